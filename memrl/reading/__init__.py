"""Reading documents with a trained model: options, loading, text files, the reader itself."""
