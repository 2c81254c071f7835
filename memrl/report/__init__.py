"""Tables, pictures and pages of what runs and evaluations wrote."""
