"""Evaluation of models by method and document length: tasks, reading, results folders, tables and plots."""
