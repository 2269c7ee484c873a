"""What DataParallel looks at so that no rank goes its own way in silence.

`settings`: what it is asked for, at the border; `agreement`: whether all ranks bring the same, at the start;
`membership`, `frozen`: what came into the module later; `finite`: infinity and NaN; `tripwire`: parameters that drift
apart; `arriving`: numbers that a check reads from a device without waiting for it.
"""
