"""What an answer is worth: verifiers, scores, reward functions in processes of their own, evidence."""
