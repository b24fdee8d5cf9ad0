//! Memory for other processes: by a descriptor, and by a handle of the fabric.

use std::process::{Command, Stdio};

use egm_vendor::cuda::{Attribute, Kind, Memory};

use super::each::devices;
use super::each::{Seen, on_family};
use super::gpu::{self, Family, Gpu};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::validate::{Part, Setting};

/// Most bytes that are shared.
const MOST: u64 = 1 << 30;
/// The process on the other side.
pub(super) const IMPORT: Part = Part { name: "cuda.import", run: import };
/// Folder of IMEX channels.
const CHANNELS: &str = "/dev/nvidia-caps-imex-channels";

/// Another process finds the bytes and changes them.
pub(super) fn by_descriptor(setting: &Setting, family: Family) -> Result<Finding, Broken> {
    on_family(setting, family, false, |gpu, kind, claim| {
        if !gpu.context.attributes().has(Attribute::POSIX_HANDLE) {
            claim.untrue(format!("this GPU reports 0 for {}", Attribute::POSIX_HANDLE));
            return Ok(Vec::new());
        }
        let memory = Memory::new(&gpu.context, kind, setting.most.min(MOST))?;
        gpu.fill(&memory, memory.bytes(), setting.seed)?;
        let mut command = Command::new("/proc/self/exe");
        let node = if let Kind::HostNuma(node) = kind { node.to_string() } else { "device".to_owned() };
        command.args(["part", IMPORT.name, &gpu.device().ordinal.to_string(), &node]);
        command.args([memory.bytes().to_string(), setting.seed.to_string()]);
        // The descriptor is the other process' standard input.
        let output = command.stdin(Stdio::from(memory.export()?)).stdout(Stdio::null()).output();
        let output = output.map_err(Broken::system("cannot start the other process"))?;
        claim.holds(output.status.success(), || {
            let said = String::from_utf8_lossy(&output.stderr);
            format!("the other process: {}, {}", said.trim(), output.status)
        });
        seen_by_both(gpu, &memory, !setting.seed, "the other process wrote", claim)?;
        claim.seen(format!("{:#x} bytes of {kind}", memory.bytes()));
        Ok(Vec::new())
    })
}

/// The GPU, and processors where they reach the memory, read the pattern.
fn seen_by_both(
    gpu: &Gpu,
    memory: &Memory,
    seed: u64,
    writer: &str,
    claim: &mut Claim,
) -> Result<(), Broken> {
    gpu::note(claim, &format!("{writer}, the GPU read"), gpu.compare(memory, memory.bytes(), seed)?, seed);
    if let Ok(words) = memory.words() {
        gpu::note(claim, &format!("{writer}, a processor read"), gpu::compare(words, seed), seed);
    }
    Ok(())
}

/// The other process: its standard input is the memory; it compares it with the pattern and writes another one.
fn import(words: &[String]) -> Result<(), Broken> {
    let wrong = || Broken::Argument(words.join(" "), "is not GPU NODE BYTES SEED");
    let [ordinal, node, bytes, seed] = words else { return Err(wrong()) };
    let (Ok(bytes), Ok(seed)) = (bytes.parse::<u64>(), seed.parse::<u64>()) else { return Err(wrong()) };
    let kind = node.parse().map_or(Kind::Device, Kind::HostNuma);
    let devices = devices()?.map_err(|finding| Broken::Other(finding.reason))?;
    let named = devices.iter().find(|device| device.ordinal.to_string() == *ordinal);
    let device = *named.ok_or_else(wrong)?;
    let gpu = Gpu::new(device)?;
    let memory = Memory::import(&gpu.context, kind, bytes, &std::io::stdin())?;
    let mut claim = Claim::default();
    seen_by_both(&gpu, &memory, seed, "the first process wrote", &mut claim)?;
    gpu.fill(&memory, bytes, !seed)?;
    let finding = claim.finish();
    if finding.outcome == egm_guest::findings::Outcome::Passed {
        Ok(())
    } else {
        Err(Broken::Other(finding.reason))
    }
}

/// Memory has a handle for other machines of the fabric.
pub(super) fn by_fabric(setting: &Setting) -> Result<Finding, Broken> {
    on_family(setting, Family::HostNuma, false, |gpu, kind, claim| {
        for kind in [Kind::Device, kind] {
            match Memory::fabric_handle(&gpu.context, kind) {
                Ok(handle) => {
                    claim.holds(handle.iter().any(|byte| *byte != 0), || {
                        format!("{kind}: a handle of zeroes")
                    });
                    claim.seen(format!("{kind}: a handle"));
                }
                Err(error) if error.is_unsupported() => {
                    let value = gpu.context.attributes().get(Attribute::FABRIC_HANDLE).unwrap_or(0);
                    let has = std::path::Path::new(CHANNELS).join("channel0").exists();
                    let channel = if has { "there" } else { "missing" };
                    return Ok(Seen::Not(format!(
                        "{kind}: {error}; {} is {value}, {CHANNELS}/channel0 is {channel}: start nvidia-imex, or load the driver with NVreg_CreateImexChannel0=1",
                        Attribute::FABRIC_HANDLE
                    )));
                }
                Err(error) => claim.untrue(format!("{kind}: {error}")),
            }
        }
        Ok(Seen::Figures(Vec::new()))
    })
}
