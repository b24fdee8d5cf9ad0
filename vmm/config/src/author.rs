//! The configuration that an author would write for a [`Spec`]: all values in place, and all paths absolute.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use egm_address::CpuSet;
use serde_json::Value;

use super::devices::mac_text;
use super::file::{
    AffinityFile, BarsFile, BootFile, CliqueFile, ConsoleFile, CpusFile, DeviceFile, EgmFile, File,
    MemoryFile, NodeFile, OneOrMore, PcieFile, SpareFile, TopologyFile,
};
use super::pages::PageSize;
use super::slot::Slot;
use super::spec::{
    BarPlacement, BarPlacements, Boot, Clique, Console, Cpus, Device, DeviceKind, EgmSlice, Memory, Node,
    Pcie, Spec,
};
use super::tap::{FIRST_DESCRIPTOR, Tap, TapFile};

/// Why no file describes a machine.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum UnwritableSpec {
    /// Numbers of descriptors mean another file in another process.
    #[error("device \"{id}\" has a tap by descriptor, which no file can name")]
    Descriptors {
        /// Id of the device.
        id: String,
    },
    /// JSON has Unicode only.
    #[error("the path {} is not UTF-8", path.display())]
    Path { path: PathBuf },
    /// The working directory is gone.
    #[error("the path {} cannot be made absolute", path.display())]
    WorkingDirectory { path: PathBuf, source: io::Error },
}

impl Spec {
    /// A configuration file, by itself, of which [`parse_with`](crate::parse_with) makes this specification again; its
    /// paths are absolute. The trust domain is left out, because no file can choose it. Descriptors of taps have numbers from 3 on, in
    /// the order of the devices.
    ///
    /// # Errors
    /// [`UnwritableSpec`].
    pub fn to_file(&self) -> Result<File, UnwritableSpec> {
        let mut numbers = FIRST_DESCRIPTOR..;
        let mut place = |count| Some(numbers.by_ref().take(count).collect());
        let devices = self.devices.iter().filter_map(|device| device_file(device, &mut place).transpose());
        let devices = devices.map(|device| Ok(Slot::new(device?))).collect::<Result<_, _>>()?;
        Ok(File {
            description: Some(self.description.clone()).filter(|text| !text.is_empty()),
            name: Some(self.name.clone()),
            arch: Some(self.arch),
            cpus: Some(cpus(&self.cpus)),
            memory: Some(memory(&self.memory)),
            boot: Some(boot(&self.boot)?),
            egm: some(self.egm.iter().map(|slice| Slot::new(self.slice_file(slice))).collect()),
            devices: some(devices),
            console: Some(console(&self.console)?),
            pcie: Some(pcie(&self.pcie)),
            on_reset: Some(self.on_reset),
            ..File::default()
        })
    }

    /// A node of `"memory"` has its distances and figures there.
    fn slice_file(&self, slice: &EgmSlice) -> EgmFile {
        let has_own_node = self.memory.nodes.iter().all(|node| node.id != slice.node);
        EgmFile {
            region: OneOrMore::More(slice.regions.clone()),
            size: slice.size,
            node: slice.node,
            form: Some(slice.form),
            page_size: Some(slice.page_size).filter(|size| *size != PageSize::Auto),
            host_nodes: slice.host_nodes.clone().filter(|nodes: &CpuSet| nodes.iter().next().is_some()),
            distances: distances(slice.node, &slice.distances).filter(|_| has_own_node),
            access: some(slice.access.clone()).filter(|_| has_own_node),
        }
    }
}

impl Spec {
    /// Id and numbers of each network device with descriptors of a tap, in the order of the devices.
    pub fn tap_descriptors(&mut self) -> impl Iterator<Item = (&str, &mut Vec<i32>)> {
        self.devices.iter_mut().filter_map(|device| match &mut device.kind {
            DeviceKind::VirtioNet { tap: Tap::Descriptors(numbers), .. } => {
                Some((device.id.as_str(), numbers))
            }
            _ => None,
        })
    }
}

impl Device {
    /// The entry of `"devices"` that [`NewDevice::parse`](crate::NewDevice::parse) makes this device of again; its paths are
    /// absolute. `None` for a slice, which is in another list.
    ///
    /// # Errors
    /// [`UnwritableSpec`].
    pub fn to_json(&self) -> Result<Option<Value>, UnwritableSpec> {
        Ok(device_file(self, &mut |_| None)?.map(|file| file.to_json()))
    }
}

/// A list that has entries.
fn some<T>(list: Vec<T>) -> Option<Vec<T>> {
    Some(list).filter(|list| !list.is_empty())
}

fn absolute(path: &Path) -> Result<PathBuf, UnwritableSpec> {
    let absolute = std::path::absolute(path);
    let absolute =
        absolute.map_err(|source| UnwritableSpec::WorkingDirectory { path: path.to_owned(), source })?;
    match absolute.to_str() {
        Some(_) => Ok(absolute),
        None => Err(UnwritableSpec::Path { path: absolute }),
    }
}

fn cpus(cpus: &Cpus) -> CpusFile {
    let Cpus { count, sockets, cores, threads, affinity } = cpus;
    let topology = TopologyFile { sockets: Some(*sockets), cores: Some(*cores), threads: Some(*threads) };
    let affinity = some(affinity.clone()).map(AffinityFile::Each);
    CpusFile { count: Some(*count), topology: Some(topology), affinity }
}

fn memory(memory: &Memory) -> MemoryFile {
    let Memory { size, page_size, prefault, nodes } = memory;
    MemoryFile {
        size: Some(*size).filter(|size| size.get() > 0),
        page_size: Some(*page_size),
        prefault: Some(*prefault),
        nodes: Some(nodes.iter().map(|node| Slot::new(self::node(node))).collect()),
    }
}

fn node(node: &Node) -> NodeFile {
    let Node { id, size, cpus, host_nodes, distances, access } = node;
    NodeFile {
        id: *id,
        size: Some(*size).filter(|size| size.get() > 0),
        cpus: Some(cpus.clone()).filter(|cpus| cpus.iter().next().is_some()),
        host_nodes: host_nodes.clone(),
        distances: self::distances(*id, distances),
        access: some(access.clone()),
    }
}

/// Distances to other nodes: that to itself is no choice.
fn distances(id: u32, distances: &BTreeMap<u32, u8>) -> Option<BTreeMap<String, u8>> {
    let others = distances.iter().filter(|(other, _)| **other != id);
    let others: BTreeMap<String, u8> = others.map(|(other, value)| (other.to_string(), *value)).collect();
    Some(others).filter(|others| !others.is_empty())
}

fn boot(boot: &Boot) -> Result<BootFile, UnwritableSpec> {
    Ok(BootFile {
        kernel: Some(absolute(&boot.kernel)?),
        initramfs: boot.initramfs.as_deref().map(absolute).transpose()?,
        cmdline: Some(boot.cmdline.clone()).filter(|text| !text.is_empty()),
        tables: Some(boot.tables),
    })
}

fn console(console: &Console) -> Result<ConsoleFile, UnwritableSpec> {
    Ok(match console {
        Console::Stdio => ConsoleFile::Stdio,
        Console::File { path } => ConsoleFile::File { path: absolute(path)? },
        Console::Pty => ConsoleFile::Pty,
        Console::Socket { path } => ConsoleFile::Socket { path: absolute(path)? },
        Console::Null => ConsoleFile::Null,
    })
}

fn pcie(pcie: &Pcie) -> PcieFile {
    let spare = pcie.spare.map(|spare| SpareFile {
        ports: Some(spare.ports.into()),
        window64: Some(spare.window64),
        window32: Some(spare.window32),
    });
    PcieFile { window64: pcie.window64, topology: Some(pcie.topology), spare }
}

/// `device`; `None` for a slice, which is in another list. `place` numbers as many descriptors of a tap, if that is possible.
fn device_file(
    device: &Device,
    place: &mut dyn FnMut(usize) -> Option<Vec<u64>>,
) -> Result<Option<DeviceFile>, UnwritableSpec> {
    let (id, root_port) = (Some(device.id.clone()), Some(device.root_port));
    Ok(Some(match &device.kind {
        DeviceKind::VirtioBlk { path, read_only } => {
            DeviceFile::VirtioBlk { id, root_port, path: absolute(path)?, read_only: Some(*read_only) }
        }
        DeviceKind::VirtioNet { tap, mac, queue_pairs, vhost } => DeviceFile::VirtioNet {
            id,
            root_port,
            tap: match tap {
                Tap::Name(name) => TapFile::Name(name.clone()),
                Tap::Descriptors(numbers) => {
                    let placed = place(numbers.len());
                    let unwritable = || UnwritableSpec::Descriptors { id: device.id.clone() };
                    TapFile::Descriptors(placed.ok_or_else(unwritable)?)
                }
            },
            mac: Some(mac_text(*mac)),
            queue_pairs: Some(*queue_pairs),
            vhost: *vhost,
        },
        DeviceKind::VirtioVsock { cid, socket } => {
            let socket = socket.as_deref().map(absolute).transpose()?;
            DeviceFile::VirtioVsock { id, root_port, cid: *cid, socket }
        }
        DeviceKind::VirtioRng => DeviceFile::VirtioRng { id, root_port },
        DeviceKind::Egm { .. } => return Ok(None),
        DeviceKind::Vfio { function, backend, clique, bars, p2p } => DeviceFile::Vfio {
            id,
            root_port,
            function: *function,
            backend: Some(*backend),
            clique: Some(match clique {
                Clique::Auto => CliqueFile::Name("auto".to_owned()),
                Clique::Off => CliqueFile::Name("off".to_owned()),
                Clique::Number(number) => CliqueFile::Number((*number).into()),
            }),
            bars: Some(self::bars(bars)),
            p2p: Some(*p2p),
        },
        DeviceKind::VfioUser { socket } => DeviceFile::VfioUser { id, root_port, socket: absolute(socket)? },
    }))
}

fn bars(bars: &BarPlacements) -> BarsFile {
    match bars {
        BarPlacements::Guest => BarsFile::All("guest".to_owned()),
        BarPlacements::Host => BarsFile::All("host".to_owned()),
        BarPlacements::Each(fixed) => BarsFile::Each(
            fixed
                .iter()
                .map(|bar| {
                    let place = match bar.place {
                        BarPlacement::Host => "host".to_owned(),
                        BarPlacement::At(at) => format!("{:#x}", at.get()),
                    };
                    (bar.index.to_string(), place)
                })
                .collect(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use crate::{NewDevice, Overrides, load, load_with, parse_with};

    /// Every configuration of the repository comes back from the file that is written for it.
    #[test]
    fn a_written_specification_is_read_as_the_same_machine() {
        let configs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
        let mut seen = 0;
        for entry in std::fs::read_dir(configs).unwrap() {
            let path = entry.unwrap().path();
            let is_machine = path.extension().is_some_and(|extension| extension == "json");
            let Some(spec) = is_machine.then(|| load(&path).ok()).flatten() else { continue };
            let Ok(file) = spec.to_file() else { continue };
            let text = file.to_json();
            let again = parse_with("/other/m.json".as_ref(), text.clone().into(), &Overrides::default());
            let again = again.unwrap_or_else(|error| panic!("{}: {error}\n{text}", path.display()));
            let paths = |spec: &crate::Spec| {
                let mut spec = spec.clone();
                spec.boot.kernel = std::path::absolute(&spec.boot.kernel).unwrap();
                spec
            };
            assert_eq!(paths(&again), paths(&spec), "{}", path.display());
            seen += 1;
        }
        assert!(seen > 10, "{seen}");
    }

    #[test]
    fn a_written_device_is_plugged_in_as_the_same_one() {
        for text in [
            r#"{"type":"virtio-net","tap":"tap0","vhost":false}"#,
            r#"{"type":"virtio-blk","path":"/d","id":"disk"}"#,
            r#"{"type":"virtio-vsock","cid":3}"#,
            r#"{"type":"vfio","function":"0000:41:00.0","clique":3}"#,
            r#"{"type":"vfio-user","socket":"/s"}"#,
        ] {
            let device = NewDevice::parse(text.into()).unwrap().named("one", "vm");
            let written = device.to_json().unwrap().unwrap().to_string();
            let again = NewDevice::parse(written.clone().into()).unwrap();
            assert_eq!((again.id(), again.named("one", "other")), (Some("one"), device), "{written}");
        }
    }

    #[test]
    fn values_of_the_command_line_are_written_and_a_trust_domain_is_not() {
        let smoke = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/smoke.json");
        let append = Some("more".to_owned());
        let overrides = Overrides { append, trust_domain: Some("t".to_owned()), ..Overrides::default() };
        let spec = load_with(&smoke, &overrides).unwrap();
        let text = spec.to_file().unwrap().to_json();
        assert!(text.contains("more") && !text.contains("trust"), "{text}");
    }
}
