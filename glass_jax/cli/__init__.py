"""The ``glass`` command, and ``tilec``, its ``lower`` under the name that users of this stack know."""
