# Tries to make bubblewrap read the first words of the command as options that open the sandbox. command: --bind / /
# python3

from knows import KIT
from lead import tries

tries("the kit", lambda: open(f"{KIT}/startup/client.key").read())
tries("the disk", lambda: open(f"{KIT}/left-here", "w"))
