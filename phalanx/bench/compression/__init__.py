"""`phalanx bench compression`: recipes under each compressor over slow links, and the adviser's numbers.

plan.py    what is run: recipes, compressors, links
netns.py   a real slow link: two network namespaces with a shaped pair of interfaces between them
rank.py    one case after the other, as a rank runs them
probe.py   what the adviser needs: a step's computing, this machine's link
run.py     all of it from the parent's side
show.py    tables and the picture
"""
