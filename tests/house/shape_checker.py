"""The checker of annotations at run time; an int passes for a float, as type checkers agree."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
