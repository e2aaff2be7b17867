"""What a disk holds after a power cut: a recorder of file operations and a simulator that cuts them anywhere."""
