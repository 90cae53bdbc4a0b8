"""Read DICOM series as volumes, and segmentations and contours as masks."""
