"""Small models in closed languages, which learn in minutes on a CPU: their lessons and their start."""
