"""Where the parts meet: the controller (THE loop), the trainer process, evaluation, and the
launcher that starts, watches and stops them all."""
