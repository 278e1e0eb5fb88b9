"""The commands of `titan-sparse COMMAND`, a module each. titan_sparse/__main__.py starts them."""
