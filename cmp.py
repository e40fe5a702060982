def load(f):
    r={}
    for l in open(f):
        if l.startswith("import time:") and "|" in l:
            a=l[12:].split("|")
            try: r[a[2].strip()]=(int(a[0]),int(a[1]))
            except ValueError: pass
    return r
import glob,sys
a,b=load(sys.argv[1]),load(sys.argv[2])
print(len(a),len(b), sum(v[0] for v in a.values()), sum(v[0] for v in b.values()))
new=[(b[k][0],k) for k in b if k not in a and not k.startswith("phalanx")]
print(sum(x for x,_ in new), sorted(new)[-25:])
print(sum(b[k][0] for k in b if k not in a and k.startswith("phalanx")))
