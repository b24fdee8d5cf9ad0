//! Facts that no file shows: limits of this process, the kernel's log, and answers of vendors' libraries. A library is
//! asked in a process of its own, because it may end the one that it is loaded into.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, ExitCode};
use std::time::Duration;

use clap::ValueEnum;
use egm_vendor::verbs::Verbs;
use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};

use crate::answer::{answer, answer_of};
use crate::sysfs;
use crate::tree::Tree;

/// Number of `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED` in `cuda.h`.
pub(super) const DMA_BUF: i32 = 124;

/// CUDA's attributes: number, name, whether 0 is a lack, and the remedy.
pub(super) const ATTRIBUTES: [(i32, &str, bool, &str); 10] = [
    (
        110,
        "GPUDirect RDMA with VMM",
        true,
        "needs the open modules (515 and later) and a GPU that is no vGPU",
    ),
    (116, "GPUDirect RDMA", true, "needs a data-centre or professional GPU; in a guest a whole function"),
    (117, "flush options", false, ""),
    (118, "writes ordering", false, ""),
    (
        DMA_BUF,
        "dma-buf",
        true,
        "needs the open modules, a kernel from 5.12 on with CONFIG_DMA_SHARED_BUFFER, CUDA from 11.7 on",
    ),
    (128, "fabric handles", false, ""),
    (134, "host NUMA node", false, ""),
    (141, "HOST_NUMA memory", true, "needs a newer driver; EGM is allocated by it"),
    (142, "HOST_NUMA pools", true, "needs a newer driver"),
    (143, "HOST_NUMA over nodes", false, ""),
];

/// Time limit of a library's answer.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Longest answer, in bytes.
const MAX_ANSWER: usize = 1 << 20;
/// Most records of the kernel's log, and bytes of one.
const MAX_RECORDS: usize = 65_536;
const MAX_RECORD: usize = 8192;

/// A library that is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Probe {
    /// Attributes of each GPU, by libcuda.
    Cuda,
    /// Whether RDMA devices take dma-bufs, by libibverbs.
    Dmabuf,
}

impl Probe {
    const fn word(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Dmabuf => "dmabuf",
        }
    }
}

/// A GPU as libcuda has it: its address or name, and attributes by their numbers.
pub(super) type Attributes = (String, BTreeMap<i32, i32>);

/// An RDMA device and whether it takes dma-bufs, or the reason why it did not answer.
pub(super) type Takes = (String, Result<bool, String>);

/// Answers of this machine while it runs.
#[derive(Debug)]
pub(super) struct Live {
    /// Messages of the kernel's log, or why they cannot be read.
    pub(super) log: Result<Vec<String>, String>,
    /// Bytes that this process may lock, `None` without a limit; or why that is not known.
    pub(super) memlock: Result<Option<u64>, String>,
    /// Whether that limit does not count for this process, because it may lock all that it likes.
    pub(super) locks_all: bool,
    /// GPUs by libcuda, or why there is no answer.
    pub(super) cuda: Result<Vec<Attributes>, String>,
    /// RDMA devices and whether each takes dma-bufs, or why there is no answer.
    pub(super) dmabuf: Result<Vec<Takes>, String>,
}

impl Live {
    /// Facts of this machine: asks the kernel, and each vendor's library in a process of its own.
    pub(super) fn look() -> Self {
        Self {
            log: log(),
            memlock: Ok(getrlimit(Resource::Memlock).current),
            locks_all: locks_all(&Tree::live()),
            cuda: ask(Probe::Cuda),
            dmabuf: ask(Probe::Dmabuf),
        }
    }

    /// Of a recorded machine: its log is `/var/log/dmesg`, and nothing else is known.
    pub(super) fn recorded(tree: &Tree) -> Self {
        let not_here = || "not asked of a recorded machine".to_owned();
        let lines = |text: String| text.lines().map(str::to_owned).collect();
        Self {
            log: tree.text("/var/log/dmesg").map(lines).ok_or_else(not_here),
            memlock: Err(not_here()),
            locks_all: false,
            cuda: Err(not_here()),
            dmabuf: Err(not_here()),
        }
    }
}

/// Whether this process has `CAP_IPC_LOCK` where the kernel asks for it when memory is registered: in the first user
/// namespace, which is the one in which all users exist, with their own numbers.
fn locks_all(tree: &Tree) -> bool {
    const IPC_LOCK: u64 = 1 << 14;
    let status = tree.text("/proc/self/status").unwrap_or_default();
    let effective = sysfs::field(&status, "CapEff").and_then(|word| u64::from_str_radix(word, 16).ok());
    let users = tree.text("/proc/self/uid_map").unwrap_or_default();
    effective.is_some_and(|capabilities| capabilities & IPC_LOCK != 0)
        && users.split_whitespace().eq(["0", "0", "4294967295"])
}

/// The messages that the kernel still has.
fn log() -> Result<Vec<String>, String> {
    let why = |error: std::io::Error| format!("/dev/kmsg cannot be read: {error}");
    let nonblocking = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or(0);
    let mut file = OpenOptions::new().read(true).custom_flags(nonblocking).open("/dev/kmsg").map_err(why)?;
    let mut messages = Vec::new();
    let mut record = vec![0; MAX_RECORD];
    for _ in 0..MAX_RECORDS {
        match file.read(&mut record) {
            Ok(0) => break,
            Ok(count) => {
                let text = String::from_utf8_lossy(record.get(..count).unwrap_or_default()).into_owned();
                messages.extend(message(&text));
            }
            // Overwritten while it was read: the next one is there.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(why(error)),
        }
    }
    Ok(messages)
}

/// The message of a record: `priority,number,time,flags;message`, then lines that begin with a blank.
fn message(record: &str) -> Option<String> {
    record.lines().next()?.split_once(';').map(|(_, message)| message.to_owned())
}

/// Asks a library in a process of its own.
fn ask<T: for<'a> Deserialize<'a>>(probe: Probe) -> Result<T, String> {
    let mut command = Command::new("/proc/self/exe");
    command.args(["probe", probe.word()]);
    let text = answer_of(command, TIMEOUT, MAX_ANSWER, &mut |_| {})?;
    serde_json::from_slice::<Result<T, String>>(&text).map_err(|error| format!("no answer: {error}"))?
}

/// Answers on what was standard output.
pub(crate) fn probe_in_this_process(probe: Probe) -> ExitCode {
    answer(|| match probe {
        Probe::Cuda => document(&cuda()),
        Probe::Dmabuf => document(&dmabuf()),
    })
}

fn document<T: Serialize>(answer: &Result<T, String>) -> String {
    serde_json::to_string(answer).unwrap_or_default()
}

fn cuda() -> Result<Vec<Attributes>, String> {
    if let Some(finding) = crate::library::unloadable("libcuda.so.1") {
        return Err(finding.reason);
    }
    let driver = egm_vendor::cuda::Driver::open().map_err(|error| error.to_string())?;
    let devices = driver.devices().map_err(|error| error.to_string())?;
    let attributes = |device: egm_vendor::cuda::Device| {
        let name = device.pci_address().map(|a| a.to_string()).or_else(|_| device.name());
        let known = ATTRIBUTES.iter();
        let values = known.filter_map(|(number, ..)| Some((*number, device.attribute(*number).ok()?)));
        (name.unwrap_or_else(|error| error.to_string()), values.collect())
    };
    Ok(devices.into_iter().map(attributes).collect())
}

/// The call that NCCL probes with too: a domain that takes dma-bufs refuses descriptor -1 as a bad one, others answer
/// that there is no such call.
fn dmabuf() -> Result<Vec<Takes>, String> {
    let library = crate::library::open(&[Verbs::NAME]).map_err(|finding| finding.reason)?;
    let verbs = Verbs::new(library).map_err(|error| error.to_string())?;
    let devices = verbs.devices().map_err(|error| format!("{error}; load ib_uverbs"))?;
    let takes = |device: egm_vendor::verbs::Device<'_, '_>| {
        let asked = device.open().and_then(|context| context.domain()?.takes_dmabuf());
        (device.name(), asked.map_err(|error| error.to_string()))
    };
    Ok(devices.iter().map(takes).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::tests::recorded;

    #[test]
    fn only_a_capability_in_the_first_user_namespace_locks_without_limit() {
        let judged = |capabilities: &str, users: &str| {
            let (_folder, tree) = recorded(&format!(
                "== /proc/self/status\nName:\tx\nCapEff:\t{capabilities}\n== /proc/self/uid_map\n{users}\n"
            ));
            locks_all(&tree)
        };
        let first = "         0          0 4294967295";
        assert!(judged("000001ffffffffff", first) && judged("0000000000004000", first));
        assert!(!judged("0000000000000000", first) && !judged("000001ffffffbfff", first));
        assert!(!judged("000001ffffffffff", "         0     100000      65536"), "root of a container");
        let (_folder, nothing) = recorded("");
        assert!(!locks_all(&nothing));
    }

    #[test]
    fn a_message_is_what_follows_the_semicolon_in_the_first_line() {
        assert_eq!(message("6,1,2,-;NVRM: x; y\n SUBSYSTEM=pci\n").as_deref(), Some("NVRM: x; y"));
        assert_eq!(message("no record"), None);
    }
}
