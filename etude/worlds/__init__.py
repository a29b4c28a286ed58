"""Where agents act, and where they are graded: machines that are made in milliseconds, hold one working copy, reach no
network, and vanish with the process that asked for them. `pool.open_worlds` is the door."""
