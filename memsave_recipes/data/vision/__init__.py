"""Images: folders and data sets of them, decoding, augmentation."""
