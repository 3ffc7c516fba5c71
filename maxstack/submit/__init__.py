"""`maxstack submit`: the processes of a run on this machine, or the input of a cluster's own
commands that start them."""
