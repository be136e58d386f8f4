-- ARGV: number of pages. Begins a publish of several parts: keeps as many ticks for marking those pages that are there as
-- used, so that none of them goes to make room for another, and as many later ones for when they are stored. The tick
-- before them.
-- The first write: one that a server without memory refuses.
return call('HINCRBY', root, 'tick', 2 * ARGV[1]) - 2 * ARGV[1]
