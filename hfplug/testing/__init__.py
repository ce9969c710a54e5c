"""The contract kit: a method's test joins the contract of its kind in one line. Shipped as a pytest plugin."""
