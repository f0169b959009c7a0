"""The files of gspo that run in a server's processes, which need not have gspo."""
