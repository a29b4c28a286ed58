"""Starting, watching and stopping the processes of a run, and what a person sees of it
meanwhile."""
