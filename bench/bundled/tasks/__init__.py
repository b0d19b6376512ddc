"""One file a kind of problem; `tasks.py` lists all, `checks.py` judges answers."""
