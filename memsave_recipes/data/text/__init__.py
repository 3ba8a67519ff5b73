"""Text: documents, labelled texts and conversations; tokenizers, and rows of tokens."""
