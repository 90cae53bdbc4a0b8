"""Programs that write and check the pages, and the files of jobs."""
