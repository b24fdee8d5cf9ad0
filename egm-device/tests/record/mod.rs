//! The record of a host, as `egm-vmm facts` writes it, from output of `egm-device regions --json`.

use egm_device::record::RECORD_VERSION;
use serde_json::{Value, json};

/// The record of the host that `regions` is the output about, with the keys that this program ignores.
pub(crate) fn of(regions: &Value) -> Value {
    let host = &regions["host"];
    let all =
        |list: &Value, one: fn(&Value) -> Value| list.as_array().unwrap().iter().map(one).collect::<Value>();
    let node = |node: &Value| {
        let memory = json!({ "total": node["total"], "available": 0 });
        json!({ "id": node["id"], "cpus": node["cpus"], "memory": memory, "distances": [10], "pools": node["pools"] })
    };
    let region = |region: &Value| json!({ "region": region, "held": [], "clean": [] });
    json!({
        "version": RECORD_VERSION,
        "description": "recorded by a test",
        "arch": host["arch"],
        "product": host["product"],
        "kvm": { "absent": "not recorded" },
        "command_line": host["command_line"],
        "memory_map": { "iomem": host["iomem"], "firmware": host["firmware"], "affinity": host["affinity"] },
        "nodes": all(&host["nodes"], node),
        "regions": all(&regions["regions"], region),
        "functions": [],
    })
}
