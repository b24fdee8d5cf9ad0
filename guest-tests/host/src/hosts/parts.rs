//! The host's side of a machine's devices: the disk, the tap with an echo behind it, the socket with one.
//!
//! The plan names what is needed, so a scenario does not repeat its configuration.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use egm_address::{Gpa, Guest, Hpa, Span};
use serde::Deserialize;
use vsock::{VMADDR_CID_ANY, VsockListener};

use crate::engine::command::Tool;
use crate::engine::error::LabError;
use crate::hosts::extent::Extent;

/// The host's address on a tap, a /24.
pub(crate) const HOST: Ipv4Addr = Ipv4Addr::new(192, 168, 100, 1);
pub(crate) const GUEST: Ipv4Addr = Ipv4Addr::new(192, 168, 100, 2);
/// The emulated host's own network card, at one hub with those that guests get.
pub(crate) const HUB: Ipv4Addr = Ipv4Addr::new(192, 168, 101, 1);
/// Port of every echo: the echo protocol's (RFC 862).
pub(crate) const PORT: u16 = 7;
/// Size of a disk that is made here, in bytes.
const DISK: u64 = 64 << 20;

/// The fields of `egm-vmm plan --json` that the lab reads.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct Plan {
    /// One entry for each vCPU.
    pub(crate) vcpus: Vec<serde::de::IgnoredAny>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) pci: Vec<Function>,
    #[serde(default)]
    memory: Vec<Piece>,
    /// Host memory behind it.
    #[serde(default)]
    backings: Vec<Backing>,
}

/// A piece of guest RAM.
#[derive(Debug, Clone, Deserialize)]
struct Piece {
    span: Span<Guest>,
    backing: usize,
    offset: u64,
}

/// Host memory behind guest RAM.
#[derive(Debug, Clone, Deserialize)]
struct Backing {
    #[serde(default)]
    id: String,
    hpa: Option<Hpa>,
    #[serde(default)]
    offset: u64,
    size: u64,
    pages: Option<Pages>,
}

/// Host pages of ordinary memory.
#[derive(Debug, Clone, Deserialize)]
struct Pages {
    size: u64,
}

/// A NUMA node of the plan.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Node {
    /// Bytes, EGM or not.
    pub(crate) memory: u64,
}

/// A PCI function of the plan.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Function {
    role: Role,
}

#[derive(Debug, Clone, Deserialize)]
struct Role {
    device: Option<Device>,
}

#[derive(Debug, Clone, Deserialize)]
struct Device {
    kind: Part,
}

/// A device with a part on the host.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub(crate) enum Part {
    VirtioBlk {
        path: PathBuf,
    },
    VirtioNet {
        tap: String,
    },
    VirtioVsock {
        /// The Unix socket of the userspace form; without one the kernel's is used.
        socket: Option<PathBuf>,
    },
    /// Nothing that the lab makes.
    #[serde(other)]
    Other,
}

impl Plan {
    /// Parses the output of `egm-vmm plan --json`.
    pub(crate) fn read(json: &[u8]) -> Result<Self, LabError> {
        LabError::json("the plan", json)
    }

    /// The file of the first disk.
    pub(crate) fn disk(&self) -> Option<&Path> {
        self.parts().find_map(|part| match part {
            Part::VirtioBlk { path } => Some(path.as_path()),
            _ => None,
        })
    }

    /// The first slice with a known address, at its host physical address.
    pub(crate) fn slice(&self) -> Option<Extent> {
        self.backings
            .iter()
            .find_map(|backing| Some(Extent { start: backing.hpa?.get(), size: backing.size }))
    }

    /// That slice, at its offset in its region.
    pub(crate) fn slice_in_region(&self) -> Option<Extent> {
        let backing = self.backings.iter().find(|backing| backing.hpa.is_some())?;
        Some(Extent { start: backing.offset, size: backing.size })
    }

    /// Whether the guest has RAM at host physical address `address`; `None` when that is not in the slice.
    pub(crate) fn has_ram_at(&self, address: u64) -> Option<bool> {
        let slice = self.slice()?;
        let offset = address.checked_sub(slice.start).filter(|offset| *offset < slice.size)?;
        let slice = self.backings.iter().position(|backing| backing.hpa.is_some())?;
        let has = |p: &Piece| (p.offset..p.offset.saturating_add(p.span.size())).contains(&offset);
        Some(self.memory.iter().filter(|p| p.backing == slice).any(has))
    }

    /// The first slice, up to its first hole, at its guest physical address.
    pub(crate) fn slice_in_guest(&self) -> Option<Extent> {
        let slice = self.backings.iter().position(|backing| backing.id.starts_with("egm"))?;
        let piece = self.memory.iter().find(|piece| piece.backing == slice)?;
        Some(Extent { start: piece.span.start().get(), size: piece.span.size() })
    }

    /// Bytes of a host page of each backing, where the plan decides it.
    pub(crate) fn page_sizes(&self) -> Vec<Option<u64>> {
        self.backings.iter().map(|backing| Some(backing.pages.as_ref()?.size)).collect()
    }

    /// Offset of guest physical address `gpa` in the first slice.
    pub(crate) fn offset_in_slice(&self, gpa: u64) -> Option<u64> {
        let slice = self.backings.iter().position(|backing| backing.id.starts_with("egm"))?;
        let piece = self.memory.iter().find(|p| p.backing == slice && p.span.contains(Gpa::new(gpa)))?;
        Gpa::new(gpa).offset_from(piece.span.start())?.checked_add(piece.offset)
    }

    /// Devices with a part on the host.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &Part> {
        self.pci.iter().filter_map(|f| f.role.device.as_ref()).map(|d| &d.kind).filter(|p| **p != Part::Other)
    }
}

/// Host resources of one boot; dropping it removes them.
#[derive(Debug, Default)]
pub(crate) struct HostParts {
    taps: Vec<String>,
    files: Vec<PathBuf>,
}

impl HostParts {
    /// Creates the resources for `parts`; disks are copies of `image`, or empty without one.
    pub(crate) fn make<'a>(
        parts: impl Iterator<Item = &'a Part>,
        image: Option<&Path>,
    ) -> Result<Self, LabError> {
        let mut made = Self::default();
        for part in parts {
            match part {
                Part::VirtioBlk { path } => made.disk(path, image)?,
                Part::VirtioNet { tap } => made.tap(tap)?,
                Part::VirtioVsock { socket: Some(socket) } => made.socket(socket)?,
                Part::VirtioVsock { socket: None } => serve_vhost_vsock()?,
                Part::Other => {}
            }
        }
        Ok(made)
    }

    fn disk(&mut self, path: &Path, image: Option<&Path>) -> Result<(), LabError> {
        make_parent(path)?;
        self.files.push(path.to_owned());
        if let Some(image) = image {
            return fs::copy(image, path).map(drop).map_err(LabError::file("copy", image));
        }
        let file = fs::File::create(path).map_err(LabError::file("make", path))?;
        file.set_len(DISK).map_err(LabError::file("size", path))
    }

    fn tap(&mut self, name: &str) -> Result<(), LabError> {
        // A killed run may have left the tap.
        remove_tap(name);
        // Busybox, in the emulated host, has an ip that does not make taps; ordinary hosts have iproute2.
        let by_ip = Tool::new("ip", "iproute2").args(["tuntap", "add", "dev", name, "mode", "tap"]).bytes();
        by_ip.or_else(|_| Tool::new("tunctl", "uml-utilities").args(["-t", name]).bytes())?;
        self.taps.push(name.to_owned());
        let address = format!("{HOST}/24");
        Tool::new("ip", "iproute2").args(["address", "add", &address, "dev", name]).bytes()?;
        Tool::new("ip", "iproute2").args(["link", "set", name, "up"]).bytes()?;
        // Guests at taps see one network: this host forwards packets between them. All of these settings belong to the
        // tap and go with it.
        let guest = format!("{}/32", guest_at(name));
        Tool::new("ip", "iproute2").args(["route", "add", &guest, "dev", name]).bytes()?;
        for what in ["forwarding", "proxy_arp"] {
            let path = format!("/proc/sys/net/ipv4/conf/{name}/{what}");
            fs::write(&path, "1").map_err(LabError::file("write", &path))?;
        }
        serve_network(HOST)
    }

    fn socket(&mut self, base: &Path) -> Result<(), LabError> {
        make_parent(base)?;
        // The VMM connects a guest's stream to port P of the host to the socket `<base>_P`.
        let path = PathBuf::from(format!("{}_{PORT}", base.display()));
        let _ = fs::remove_file(&path);
        let _ = fs::remove_file(base);
        let listener = UnixListener::bind(&path).map_err(LabError::file("listen on", &path))?;
        self.files.push(path);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || echo(&stream, &stream));
            }
        });
        Ok(())
    }
}

impl Drop for HostParts {
    fn drop(&mut self) {
        for tap in &self.taps {
            remove_tap(tap);
        }
        for file in &self.files {
            let _ = fs::remove_file(file);
        }
    }
}

/// The address of the guest at tap `name`: [`GUEST`] for tap number 0, then the following ones.
fn guest_at(name: &str) -> Ipv4Addr {
    let digits = name.trim_start_matches(|c: char| !c.is_ascii_digit());
    let [a, b, c, first] = GUEST.octets();
    Ipv4Addr::new(a, b, c, first.saturating_add(digits.parse().unwrap_or(0)))
}

fn remove_tap(name: &str) {
    if Path::new("/sys/class/net").join(name).exists() {
        let by_ip = Tool::new("ip", "iproute2").args(["link", "delete", name]).bytes();
        let _ = by_ip.or_else(|_| Tool::new("tunctl", "uml-utilities").args(["-d", name]).bytes());
    }
}

fn make_parent(path: &Path) -> Result<(), LabError> {
    let parent = path.parent().unwrap_or_else(|| Path::new("."));
    fs::create_dir_all(parent).map_err(LabError::file("make", parent))
}

/// Echoes all input until the peer is done.
fn echo(mut from: impl Read, mut to: impl Write) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if to.write_all(buffer.get(..count).unwrap_or_default()).is_err() {
            return;
        }
    }
}

/// Echoes on an address of this host, started once: a listener outlives the address, and the threads end with the process.
pub(crate) fn serve_network(host: Ipv4Addr) -> Result<(), LabError> {
    static SERVED: [Mutex<bool>; 2] = [Mutex::new(false), Mutex::new(false)];
    let [on_taps, elsewhere] = &SERVED;
    once(if host == HOST { on_taps } else { elsewhere }, || {
        let address = (host, PORT);
        let listen = |e| LabError::file("listen on", format!("{host}:{PORT}"))(e);
        let tcp = TcpListener::bind(address).map_err(listen)?;
        let udp = UdpSocket::bind(address).map_err(listen)?;
        std::thread::spawn(move || {
            for stream in tcp.incoming().flatten() {
                std::thread::spawn(move || echo(&stream, &stream));
            }
        });
        std::thread::spawn(move || {
            let mut buffer = vec![0; 64 << 10];
            while let Ok((count, peer)) = udp.recv_from(&mut buffer) {
                // A network may lose datagrams; the guest sends again.
                let _ = udp.send_to(buffer.get(..count).unwrap_or_default(), peer);
            }
        });
        Ok(())
    })
}

/// Echoes on the host's own vsock address, for guests behind the kernel's vhost-vsock.
fn serve_vhost_vsock() -> Result<(), LabError> {
    static SERVED: Mutex<bool> = Mutex::new(false);
    once(&SERVED, || {
        let listener = VsockListener::bind_with_cid_port(VMADDR_CID_ANY, u32::from(PORT))
            .map_err(LabError::file("listen on", format!("vsock port {PORT}")))?;
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || echo(&stream, &stream));
            }
        });
        Ok(())
    })
}

fn once(served: &Mutex<bool>, start: impl FnOnce() -> Result<(), LabError>) -> Result<(), LabError> {
    let mut served = served.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if !*served {
        start()?;
        *served = true;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn parts_are_read_from_a_plan_and_what_is_unknown_is_passed_over() {
        let json = br#"{"version":1,"vcpus":[{},{}],"nodes":[{"id":2,"memory":4096,"egm":true,"cpus":"0"}],"pci":[
            {"address":"0000:00:00.0","role":{"role":"host-bridge"}},
            {"role":{"role":"endpoint","device":{"id":"d","kind":{"type":"virtio-blk","path":"/d","read_only":false}}}},
            {"role":{"role":"endpoint","device":{"id":"r","kind":{"type":"virtio-rng"}}}},
            {"role":{"role":"endpoint","device":{"id":"v","kind":{"type":"virtio-vsock","cid":3,"socket":null}}}}]}"#;
        let plan = Plan::read(json).unwrap();
        let parts: Vec<_> = plan.parts().cloned().collect();
        assert_eq!(parts, [Part::VirtioBlk { path: "/d".into() }, Part::VirtioVsock { socket: None }]);
        assert_eq!((plan.vcpus.len(), plan.nodes[0].memory), (2, 4096));
    }

    #[test]
    fn a_hole_of_a_slice_is_no_ram() {
        let json = br#"{"vcpus":[],"nodes":[],"pci":[],"backings":[{"hpa":"0x200000000","size":12288}],
            "memory":[{"span":{"start":"0x100000000","size":4096},"backing":0,"offset":0},
                      {"span":{"start":"0x100002000","size":4096},"backing":0,"offset":8192}]}"#;
        let plan = Plan::read(json).unwrap();
        let has = [0x2_0000_0000, 0x2_0000_1000, 0x2_0000_2fff, 0x2_0000_3000].map(|at| plan.has_ram_at(at));
        assert_eq!(has, [Some(true), Some(false), Some(true), None]);
    }

    #[test]
    fn a_guest_has_the_address_of_its_tap() {
        assert_eq!(guest_at("egmtap0"), GUEST);
        assert_eq!(guest_at("egmtap1"), Ipv4Addr::new(192, 168, 100, 3));
        assert_eq!(guest_at("tap"), GUEST);
    }

    #[test]
    fn a_disk_is_there_while_the_machine_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new/disk.raw");
        let parts = HostParts::make([Part::VirtioBlk { path: path.clone() }].iter(), None).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), DISK);
        drop(parts);
        assert!(!path.exists());
    }

    #[test]
    fn the_socket_of_port_seven_echoes() {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().join("vsock");
        let _parts =
            HostParts::make([Part::VirtioVsock { socket: Some(base.clone()) }].iter(), None).unwrap();
        let mut stream = UnixStream::connect(directory.path().join("vsock_7")).unwrap();
        stream.write_all(b"hello").unwrap();
        let mut back = [0; 5];
        stream.read_exact(&mut back).unwrap();
        assert_eq!(&back, b"hello");
    }
}
