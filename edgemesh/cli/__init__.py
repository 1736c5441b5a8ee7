"""The commands of ``edgemesh``, one module each, imported only when it is the one that was asked for."""
