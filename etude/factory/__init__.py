"""Factory of tasks: it turns repositories into tasks, and keeps only those that it has proven.

source -> checkout -> recipe, environment -> survey -> candidates -> proof -> task folder
"""
