"""Prints what a bug report should include: python -m gradcodec"""

import platform

from . import GradCodec, __version__

if __name__ == "__main__":
    gradcodec = GradCodec()
    print(f"package {__version__}, Python {platform.python_version()}, {gradcodec.lib._name}\n{gradcodec.build_info()}")
