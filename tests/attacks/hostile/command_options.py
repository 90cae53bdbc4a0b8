# Tries to make bubblewrap read the first words of the lead's command as options that open the sandbox.

from knows import KIT
from lead import tries

tries("the kit", lambda: open(f"{KIT}/startup/client.key").read())
tries("the disk", lambda: open(f"{KIT}/left-here", "w"))
