"""The factory: turns repositories into tasks, and keeps only what it has proven.

source -> checkout -> recipe, environment -> survey -> candidates -> proof -> task folder
"""
