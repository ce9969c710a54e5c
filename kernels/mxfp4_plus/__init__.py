"""MXFP4 with overflow-aware scaling and macro block scaling."""
