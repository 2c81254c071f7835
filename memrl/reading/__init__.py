"""Read documents with a trained model: options, loading the model, text files, the reader."""
