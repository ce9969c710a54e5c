"""One module per kind: how that kind enters the Hugging Face stack. Only these touch Hugging Face registries."""
