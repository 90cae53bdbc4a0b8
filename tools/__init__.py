"""Programs that write and check the pages of the documentation, and that write the files of jobs."""
