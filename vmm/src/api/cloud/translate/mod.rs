//! From the document to our file.

pub(crate) mod added;
mod context;
mod devices;
mod memory;

use std::collections::BTreeMap;
use std::path::PathBuf;

use egm_address::CpuSet;
use egm_config::{AffinityFile, BootFile, ConsoleFile, CpusFile, File, Refusal, TopologyFile};
use serde_json::Value;

use super::document::{
    ConsoleOutputMode, CpuAffinity, CpuTopology, CpusConfig, NumaConfig, PayloadConfig, VmConfig,
};
use super::table::{Fate, rows, values};
use context::{Context, Origins, cpu_set};

/// A document as our file.
#[derive(Debug)]
pub(crate) struct Translation {
    pub(crate) file: File,
    /// Values that the plan or the host decides, each with what happens instead.
    pub(crate) notes: Vec<String>,
    /// The document's names of our keys.
    pub(crate) origins: Origins,
}

/// Translates `config`.
///
/// # Errors
/// A refusal for each value that no machine of ours can honour.
pub(crate) fn translate(config: &VmConfig) -> Result<Translation, Vec<Refusal>> {
    translate_with(config, Vec::new())
}

/// [`translate`], with the numbers of descriptors that `fds` of its interfaces counts from 0 on.
///
/// # Errors
/// As [`translate`].
pub(crate) fn translate_with(config: &VmConfig, taps: Vec<i32>) -> Result<Translation, Vec<Refusal>> {
    let mut context = Context { taps, ..Context::default() };
    judge(&json_of(config, &context), &mut context);
    let nodes: &[NumaConfig] = config.numa.as_deref().unwrap_or_default();
    let cpus = cpus(&config.cpus, &mut context);
    let (memory, egm) = memory::translate(&config.memory, nodes, config.cpus.boot_vcpus, &mut context);
    let boot = boot(config.payload.as_ref(), &mut context);
    let console = console(config, &mut context);
    devices::translate(config, &mut context);
    if !context.refusals.is_empty() {
        return Err(context.refusals);
    }
    let mut file = File::default();
    file.cpus = Some(cpus);
    file.memory = Some(memory);
    file.boot = Some(boot);
    file.egm = (!egm.is_empty()).then_some(egm);
    file.devices = Some(context.devices);
    file.console = console;
    Ok(Translation { file, notes: context.notes, origins: context.origins })
}

/// `config` as JSON, without descriptors that are there.
fn json_of(config: &VmConfig, context: &Context) -> Value {
    let mut config = config.clone();
    config.net.iter_mut().flatten().for_each(|net| context.take_numbers(net));
    // Paths come from JSON, so they are Unicode, and every map has string keys.
    serde_json::to_value(config).unwrap_or_default()
}

/// Judges the values of fields by the table alone.
fn judge(document: &Value, context: &mut Context) {
    for row in rows() {
        let (Fate::Derived(usual) | Fate::Refused(usual)) = row.fate else { continue };
        for (key, value) in values(document, row.path) {
            match row.fate {
                _ if usual.has(value) => {}
                Fate::Refused(_) => context.refuse(key),
                _ => context.note(&key),
            }
        }
    }
}

fn cpus(cpus: &CpusConfig, context: &mut Context) -> CpusFile {
    let CpusConfig { boot_vcpus, max_vcpus, .. } = *cpus;
    if max_vcpus < boot_vcpus {
        context.refuse("cpus.max_vcpus");
    } else if max_vcpus > boot_vcpus {
        context.note("cpus.max_vcpus");
    }
    let topology = cpus.topology.as_ref().map(|topology| arranged(topology, cpus, context));
    let affinity = cpus.affinity.as_deref().filter(|entries| !entries.is_empty());
    let affinity = affinity.map(|entries| AffinityFile::Each(pinned(entries, boot_vcpus, context)));
    CpusFile { count: Some(boot_vcpus), topology, affinity }
}

/// Sockets, cores and threads of the vCPUs that start; the document's are those of max_vcpus.
fn arranged(topology: &CpuTopology, cpus: &CpusConfig, context: &mut Context) -> TopologyFile {
    let CpuTopology { threads_per_core, cores_per_die, dies_per_package, packages } = *topology;
    let parts = [threads_per_core, cores_per_die, dies_per_package, packages];
    let product = parts.into_iter().map(u64::from).fold(1, u64::saturating_mul);
    if product != u64::from(cpus.max_vcpus) {
        context.refuse("cpus.topology.cores_per_die");
    }
    TopologyFile {
        sockets: Some(packages.into()),
        cores: (cpus.max_vcpus == cpus.boot_vcpus).then(|| cores_per_die.into()),
        threads: Some(threads_per_core.into()),
    }
}

/// The host CPUs of each vCPU.
fn pinned(entries: &[CpuAffinity], vcpus: u32, context: &mut Context) -> Vec<CpuSet> {
    let (mut sets, before) = (BTreeMap::new(), context.refusals.len());
    for (index, CpuAffinity { vcpu, host_cpus }) in entries.iter().enumerate() {
        let Some(set) = cpu_set(host_cpus.iter().copied()) else {
            context.refuse(format!("cpus.affinity[{index}].host_cpus"));
            continue;
        };
        if *vcpu >= vcpus || sets.insert(*vcpu, set).is_some() {
            context.refuse(format!("cpus.affinity[{index}].vcpu"));
        }
    }
    if context.refusals.len() == before && u32::try_from(sets.len()) != Ok(vcpus) {
        context.refuse_by("cpus.affinity".to_owned(), "cpus.affinity[].vcpu");
    }
    sets.into_values().collect()
}

fn boot(payload: Option<&PayloadConfig>, context: &mut Context) -> BootFile {
    let kernel = payload.and_then(|payload| payload.kernel.clone());
    if kernel.is_none() {
        context.refuse("payload.kernel");
    }
    let cmdline = payload.and_then(|payload| payload.cmdline.clone());
    if cmdline.as_deref().is_some_and(is_without_console) {
        context.refuse("payload.cmdline");
    }
    let initramfs = payload.and_then(|payload| payload.initramfs.clone());
    BootFile { kernel, initramfs, cmdline, tables: None }
}

/// Whether a kernel with `cmdline` prints to a virtio console only.
fn is_without_console(cmdline: &str) -> bool {
    let consoles = || cmdline.split_ascii_whitespace().filter_map(|word| word.strip_prefix("console="));
    consoles().any(|name| name.starts_with("hvc")) && !consoles().any(|name| name.starts_with("tty"))
}

/// One of the document's two consoles.
struct Output<'c> {
    key: &'static str,
    mode: ConsoleOutputMode,
    file: Option<&'c PathBuf>,
    socket: Option<&'c PathBuf>,
}

/// The machine's console: the serial port's output, or else that of the virtio console.
fn console(config: &VmConfig, context: &mut Context) -> Option<ConsoleFile> {
    use ConsoleOutputMode::{File, Null, Off, Pty, Socket, Tty};
    let (serial, console) = (&config.serial, &config.console);
    let has_output = |mode| !matches!(mode, Off | Null);
    let serial = Output {
        key: "serial",
        mode: serial.mode,
        file: serial.file.as_ref(),
        socket: serial.socket.as_ref(),
    };
    let virtio = Output {
        key: "console",
        mode: console.mode,
        file: console.file.as_ref(),
        socket: console.socket.as_ref(),
    };
    for output in [&serial, &virtio] {
        if (output.mode == File) != output.file.is_some() {
            context.refuse(format!("{}.file", output.key));
        }
        if (output.mode == Socket) != output.socket.is_some() {
            context.refuse(format!("{}.socket", output.key));
        }
    }
    // libvirt sends both for a domain with both elements: they are one terminal here.
    let is_one_terminal = serial.mode == Pty && virtio.mode == Pty;
    if has_output(serial.mode) && matches!(virtio.mode, Pty | File | Socket) && !is_one_terminal {
        context.refuse("console.mode");
    }
    let chosen = if has_output(serial.mode) { serial } else { virtio };
    context.origins.add("console", chosen.key);
    match chosen.mode {
        Off | Null => Some(ConsoleFile::Null),
        Pty => Some(ConsoleFile::Pty),
        Tty => Some(ConsoleFile::Stdio),
        File => chosen.file.map(|path| ConsoleFile::File { path: path.clone() }),
        Socket => chosen.socket.map(|path| ConsoleFile::Socket { path: path.clone() }),
    }
}
