"""Several processes of one run: who they are, and how they find each other."""
