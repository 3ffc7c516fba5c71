"""A package by hand, until `maxstack package` makes them."""
import sys,json,hashlib,datetime,os
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax import export
from safetensors.numpy import save_file
def make(out, scale=1.0, name="toy"):
    out=Path(out); (out/"programs").mkdir(parents=True); (out/"weights").mkdir()
    w={"kernel":np.random.default_rng(0).standard_normal((16,4)).astype(np.float32)*scale}
    def classify(weights,state,inputs): return {"logits": inputs["x"]@weights["kernel"]}, {}
    def mean(weights,state,inputs):
        t=jnp.arange(inputs["tokens"].shape[1])<inputs["lengths"][:,None]
        return {"scores": jnp.where(t, inputs["tokens"].astype(jnp.float32),0), "mean": (jnp.where(t,inputs["tokens"],0).sum(1)/jnp.maximum(inputs["lengths"],1)).astype(jnp.float32)}, {}
    S=jax.ShapeDtypeStruct; (b,)=export.symbolic_shape("b")
    ws={k:S(v.shape,v.dtype) for k,v in w.items()}
    progs={"classify.bin":export.export(jax.jit(classify),platforms=("cpu","tpu","cuda"))(ws,{}, {"x":S((b,16),jnp.float32)})}
    for n in (8,32): progs[f"mean.{n}.bin"]=export.export(jax.jit(mean),platforms=("cpu","tpu","cuda"))(ws,{}, {"tokens":S((4,n),jnp.int32),"lengths":S((4,),jnp.int32)})
    for f,e in progs.items(): (out/"programs"/f).write_bytes(e.serialize())
    save_file(w,out/"weights/00001.safetensors")
    files={}
    for p in sorted(out.rglob("*")):
        if p.is_file(): d=p.read_bytes(); files[p.relative_to(out).as_posix()]={"bytes":len(d),"sha256":hashlib.sha256(d).hexdigest()}
    m={"format":"maxstack.package/1","name":name,"made":"2026-11-25T00:00:00Z","good_until":"2027-05-25","versions":{"maxstack":"0","jax":jax.__version__},"platforms":["cpu","tpu","cuda"],"devices":1,
     "weights":{"kernel":{"file":"weights/00001.safetensors","shape":[16,4],"dtype":"float32"}},"states":{},
     "signatures":{"classify":{"inputs":{"x":{"shape":["batch",16],"dtype":"float32"}},"outputs":{"logits":{"shape":["batch",4],"dtype":"float32"}},"state":None,"programs":[{"file":"programs/classify.bin","sizes":{"batch":None}}]},
      "mean":{"inputs":{"tokens":{"shape":["batch","length"],"dtype":"int32"},"lengths":{"shape":["batch"],"dtype":"int32"}},"outputs":{"scores":{"shape":["batch","length"],"dtype":"float32"},"mean":{"shape":["batch"],"dtype":"float32"}},"state":None,"programs":[{"file":f"programs/mean.{n}.bin","sizes":{"batch":4,"length":n}} for n in (8,32)]}},
     "files":files}
    (out/"manifest.json").write_text(json.dumps(m,indent=1))
if __name__=="__main__":
    make(sys.argv[1], float(sys.argv[2]) if len(sys.argv)>2 else 1.0)
