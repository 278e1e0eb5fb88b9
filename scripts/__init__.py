from titan_sparse.training.launcher import outlive_readers

# For each script: `python -m scripts.X | head` ends without a traceback.
outlive_readers()
