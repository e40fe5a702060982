"""`phalanx bench compression`: recipes under each compressor over slow links, and the adviser's numbers.

plan.py    what is run: recipes, compressors, links
netns.py   a real slow link: two network namespaces with a shaped pair of interfaces between them
rank.py    the runs, and the measurements for the adviser, on a rank
advise.py  the adviser: costs of compressors, and which one pays
run.py     starts the ranks and reads their results
report.py  tables and the plot
"""
