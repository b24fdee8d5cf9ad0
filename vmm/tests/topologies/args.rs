//! QEMU's arguments for a Grace machine, as far as they say what a guest sees.

use std::collections::BTreeMap;

/// The machine that the arguments describe.
#[derive(Debug, Default)]
pub(crate) struct Reference {
    /// Properties of the machine.
    pub(crate) machine: BTreeMap<String, String>,
    /// Size in bytes and file of memory, by id.
    pub(crate) backends: BTreeMap<String, (u64, Option<String>)>,
    /// Nodes in their order.
    pub(crate) nodes: Vec<Node>,
    /// Host bridges beside the first: id and node.
    pub(crate) bridges: BTreeMap<String, u32>,
    /// How many of them have an SMMU.
    pub(crate) smmus: usize,
    /// Root ports: id and the host bridge.
    pub(crate) ports: BTreeMap<String, String>,
    /// Host functions by id: address and root port.
    pub(crate) functions: BTreeMap<String, (String, String)>,
    /// Nodes of each function's memory.
    pub(crate) initiators: BTreeMap<String, Vec<u32>>,
    /// Node of each function's EGM.
    pub(crate) egm: BTreeMap<String, u32>,
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) id: u32,
    pub(crate) cpus: Option<String>,
    pub(crate) memory: Option<String>,
}

/// One argument: its first word, if that has no value, and the properties.
struct Words {
    kind: String,
    all: BTreeMap<String, String>,
}

impl Words {
    fn of(text: &str) -> Self {
        let mut words = text.split(',').peekable();
        let kind = words.next_if(|word| !word.contains('=')).unwrap_or_default().to_owned();
        let pair = |word: &str| word.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
        Self { kind, all: words.map(|word| pair(word).unwrap_or_else(|| panic!("{word}"))).collect() }
    }

    fn text(&self, key: &str) -> String {
        self.all.get(key).unwrap_or_else(|| panic!("{} has no {key}", self.kind)).clone()
    }

    fn number(&self, key: &str) -> u32 {
        self.text(key).parse().unwrap()
    }
}

/// Bytes of `16G`, `56896M` or `4T`.
pub(crate) fn bytes(text: &str) -> u64 {
    let (digits, unit) = text.split_at(text.len() - 1);
    let shift = match unit {
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => panic!("{text}"),
    };
    digits.parse::<u64>().unwrap() << shift
}

impl Reference {
    pub(crate) fn of(text: &str) -> Self {
        let mut all = Self::default();
        let mut lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        while let Some(option) = lines.next() {
            all.take(option, &Words::of(lines.next().unwrap()));
        }
        all
    }

    fn take(&mut self, option: &str, words: &Words) {
        match (option, words.kind.as_str()) {
            ("-machine", "virt") => self.machine.clone_from(&words.all),
            ("-numa", "node") => self.nodes.push(Node {
                id: words.number("nodeid"),
                cpus: words.all.get("cpus").cloned(),
                memory: words.all.get("memdev").cloned(),
            }),
            ("-object", "iommufd") => {}
            ("-object", "memory-backend-ram" | "memory-backend-file") => {
                let file = words.all.get("mem-path").cloned();
                self.backends.insert(words.text("id"), (bytes(&words.text("size")), file));
            }
            ("-device", "pxb-pcie") => {
                self.bridges.insert(words.text("id"), words.number("numa_node"));
            }
            ("-device", "arm-smmuv3") => {
                assert!(self.bridges.contains_key(&words.text("primary-bus")));
                self.smmus += 1;
            }
            ("-device", "pcie-root-port") => {
                self.ports.insert(words.text("id"), words.text("bus"));
            }
            ("-device", "vfio-pci" | "vfio-pci-nohotplug") => {
                self.functions.insert(words.text("id"), (words.text("host"), words.text("bus")));
            }
            ("-object", "acpi-generic-initiator") => {
                self.initiators.entry(words.text("pci-dev")).or_default().push(words.number("node"));
            }
            ("-object", "acpi-egm-memory") => {
                self.egm.insert(words.text("pci-dev"), words.number("node"));
            }
            (option, kind) => panic!("{option} {kind} is not known"),
        }
    }

    /// The region of the EGM node `node`, by the name of its device: `egm4`.
    pub(crate) fn region(&self, node: u32) -> Option<&str> {
        let node = self.nodes.iter().find(|other| other.id == node)?;
        let (_, file) = self.backends.get(node.memory.as_ref()?)?;
        file.as_ref()?.strip_prefix("/dev/").filter(|name| name.starts_with("egm"))
    }
}
