"""Several processes of one run: who they are, how they find each other, and how they are started on a laptop or a cluster."""
