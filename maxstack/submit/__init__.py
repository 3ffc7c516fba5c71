"""`maxstack submit`: the processes of a run on this machine, or what a cluster's own commands are
given to start them."""
