"""DICOM: series into volumes, segmentations and contours into masks, and results back."""
