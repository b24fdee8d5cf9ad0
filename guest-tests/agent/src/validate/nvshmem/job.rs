//! Starting a job's PEs and collecting what they found.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Sender};

use egm_guest::findings::Figure;
use egm_vendor::nvshmem::Library;
use serde::{Deserialize, Serialize};

use super::WORKS;
use crate::answer::{LAST_WORDS, in_background, last, quoted};
use crate::error::Broken;
use crate::finding::{Claim, Finding};
use crate::library;
use crate::validate::Setting;
use crate::validate::cuda::each::devices;

/// The part that is a PE.
pub(super) const PE: &str = "nvshmem.pe";
/// The validation with memory of its own.
pub(super) const BUFFER: &str = "nvshmem.buffer";
/// Starts the line with the job's id, on PE 0's standard output, where the library prints as well.
pub(super) const ID_LINE: &str = "egm-pe-id ";
/// Starts the line with a PE's findings.
pub(super) const FOUND_LINE: &str = "egm-pe-found ";

/// Most PEs of a job.
pub(super) const MOST_PES: i32 = 64;
/// Longest output of a PE that is read, in bytes.
const MOST_OUTPUT: u64 = 4 << 20;
/// Default of NVSHMEM's granularity of memory (`NVSHMEM_CUMEM_GRANULARITY`), in bytes.
const GRANULARITY: u64 = 512 << 20;
/// The smallest granularity that is set here: a page of the driver's.
const SMALL_GRANULARITY: u64 = 2 << 20;

/// Result of a PE.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Found {
    pub(super) untrue: Vec<String>,
    pub(super) seen: Vec<String>,
    pub(super) figures: Vec<Figure>,
    /// Why the claim cannot be decided here.
    pub(super) skipped: Option<String>,
    /// The library numbers this PE otherwise than it was started: it did no work, and the others wait for it.
    pub(super) is_another: bool,
}

/// Runs the job `name` on the GPUs of this machine.
pub(super) fn run(name: &'static str, setting: &Setting) -> Result<Finding, Broken> {
    let ready = gpus()?.and_then(|gpus| Ok((gpus, find_library(setting)?)));
    let (gpus, library) = match ready {
        Ok(ready) => ready,
        Err(finding) => return Ok(finding),
    };
    let pes = setting.args.get("nvshmem.pes", gpus)?;
    if !(1..=MOST_PES).contains(&pes) {
        return Ok(Finding::error(format!("nvshmem.pes={pes} is not 1 to {MOST_PES}")));
    }
    if let Some(work) = WORKS.iter().find(|work| work.name == name) {
        if pes < work.least {
            return Ok(Finding::skipped(format!(
                "a job of {pes} PE on {gpus} GPU: this needs {} PEs",
                work.least
            )));
        }
        if pes > gpus && !work.shared {
            let why = "without MPS, NVSHMEM has neither waits on streams nor collectives then";
            return Ok(Finding::skipped(format!("{pes} PEs share {gpus} GPU: {why}")));
        }
    }
    Job { name, setting, library, gpus, pes }.run()
}

fn gpus() -> Result<Result<i32, Finding>, Broken> {
    Ok(devices()?.map(|devices| i32::try_from(devices.len()).unwrap_or(MOST_PES).min(MOST_PES)))
}

/// Path of the library: it is loaded here once, so that what is missing is reported before anything starts.
fn find_library(setting: &Setting) -> Result<PathBuf, Finding> {
    let given = setting.args.text("nvshmem.library").map(PathBuf::from);
    let mut roots = vec![PathBuf::from("/usr/local"), PathBuf::from("/usr")];
    // Where programs are, their libraries are beside: virtual environments and the like.
    let path = std::env::var_os("PATH").unwrap_or_default();
    roots.extend(std::env::split_paths(&path).filter_map(|bin| Some(bin.parent()?.to_owned())));
    roots.dedup();
    let candidates = egm_vendor::nvshmem::candidates(given.as_deref(), &roots);
    let mut why = String::new();
    for path in &candidates {
        match library::open(&[&path.to_string_lossy()]) {
            Ok(loaded) => {
                return match Library::of(loaded, path) {
                    Ok(_) => Ok(path.clone()),
                    Err(error) => Err(Finding::skipped(error.to_string())),
                };
            }
            Err(finding) if why.is_empty() => why = finding.reason,
            Err(_) => {}
        }
    }
    let how = "install NVSHMEM (the wheel nvidia-nvshmem-cu13) or say --arg nvshmem.library=PATH";
    Err(Finding::skipped(format!("{why}: {how}")))
}

struct Job<'s> {
    name: &'static str,
    setting: &'s Setting,
    library: PathBuf,
    gpus: i32,
    pes: i32,
}

/// Messages from the threads that read a PE's output.
enum PeOutput {
    Id(String),
    End(i32, String),
}

impl Job<'_> {
    fn command(&self, pe: i32) -> Command {
        let mut command = Command::new("/proc/self/exe");
        command.args(["part", PE, self.name]);
        command.args([pe.to_string(), self.pes.to_string(), (pe % self.gpus).to_string()]);
        command.args([self.setting.seed.to_string(), self.setting.most.to_string()]);
        command.arg(&self.library);
        // No network between PEs, the id by a socket, and no multicast: a program that uses it can put the GPUs of
        // other guests of a host out of service.
        command.env("NVSHMEM_REMOTE_TRANSPORT", "none").env("NVSHMEM_BOOTSTRAP", "UID");
        command.env("NVSHMEM_DISABLE_NVLS", "1");
        if self.name == BUFFER {
            command.env("NVSHMEM_CUMEM_GRANULARITY", buffer_bytes(self.setting.most).to_string());
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self) -> Result<Finding, Broken> {
        let (send, messages) = mpsc::channel();
        let mut children = Vec::new();
        let mut inputs = Vec::new();
        let mut words = BTreeMap::new();
        for pe in 0..self.pes {
            let mut child =
                self.command(pe).spawn().map_err(Broken::system(format!("cannot start PE {pe}")))?;
            if let Some(output) = child.stdout.take() {
                let send = send.clone();
                std::thread::spawn(move || listen(pe, output, &send));
            }
            if let Some(errors) = child.stderr.take() {
                words.insert(pe, in_background(move || last(errors, LAST_WORDS)));
            }
            inputs.extend(child.stdin.take());
            children.push(child);
        }
        drop(send);
        let mut found: BTreeMap<i32, Found> = BTreeMap::new();
        // The deadline is the validation's own: past it, its whole process group goes.
        for message in messages {
            let (pe, output) = match message {
                PeOutput::Id(id) => {
                    for input in inputs.iter_mut().skip(1) {
                        // A PE that is gone already is noticed by its end.
                        let _ = writeln!(input, "{id}");
                    }
                    continue;
                }
                PeOutput::End(pe, output) => (pe, output),
            };
            let line = output.lines().rev().find_map(|line| line.strip_prefix(FOUND_LINE));
            match line.and_then(|line| serde_json::from_str::<Found>(line).ok()) {
                Some(of_pe) if of_pe.is_another => {
                    end(&mut children);
                    return Ok(Finding::failed(format!("PE {pe}: {}", of_pe.untrue.join("; "))));
                }
                Some(of_pe) => found.insert(pe, of_pe),
                None => return Ok(died(pe, &mut children, &mut words)),
            };
        }
        children.iter_mut().for_each(|child| _ = child.wait());
        Ok(self.finding(found.into_values()))
    }

    /// One finding of all PEs'.
    fn finding(&self, found: impl Iterator<Item = Found>) -> Finding {
        let (pes, gpus) = (self.pes, self.gpus.min(self.pes));
        let mut claim = Claim::default();
        claim.seen(format!(
            "{pes} PE{} on {gpus} GPU{}",
            if pes == 1 { "" } else { "s" },
            if gpus == 1 { "" } else { "s" },
        ));
        let mut figures = Vec::new();
        let mut skipped = None;
        for (pe, of_pe) in found.enumerate() {
            of_pe.untrue.into_iter().for_each(|untrue| claim.untrue(format!("PE {pe}: {untrue}")));
            // All PEs see the same things; only those of the first one are kept.
            of_pe.seen.into_iter().filter(|_| pe == 0).for_each(|seen| claim.seen(seen));
            figures.extend(of_pe.figures);
            skipped = skipped.or(of_pe.skipped);
        }
        match skipped {
            Some(reason) if claim.is_true() => Finding::skipped(reason),
            _ => claim.finish().with_figures(figures),
        }
    }
}

/// Bytes of the buffer in HOST_NUMA memory, which NVSHMEM gets as its granularity: its default, where the largest size
/// allows it.
pub(super) const fn buffer_bytes(most: u64) -> u64 {
    if most >= GRANULARITY { GRANULARITY } else { SMALL_GRANULARITY }
}

/// Reads a PE's output to its end, and hands the job's id on as soon as it is there.
fn listen(pe: i32, output: impl Read, to: &Sender<PeOutput>) {
    let mut all = String::new();
    let mut lines = BufReader::new(output.take(MOST_OUTPUT));
    loop {
        let mut line = Vec::new();
        if !matches!(lines.read_until(b'\n', &mut line), Ok(1..)) {
            break;
        }
        let line = String::from_utf8_lossy(&line);
        if let Some(id) = line.trim_end().strip_prefix(ID_LINE) {
            let _ = to.send(PeOutput::Id(id.to_owned()));
        }
        all.push_str(&line);
    }
    // This cannot be sent when the receiver has given up waiting.
    let _ = to.send(PeOutput::End(pe, all));
}

/// Ends all PEs, and returns how each did; one that has ended before is not hurt by this.
fn end(children: &mut [Child]) -> Vec<String> {
    let how = |child: &mut Child| {
        let _ = child.kill();
        child.wait().map_or_else(|error| error.to_string(), |status| status.to_string())
    };
    children.iter_mut().map(how).collect()
}

/// A PE ended without findings: the others would wait for it for ever.
fn died(pe: i32, children: &mut [Child], words: &mut BTreeMap<i32, mpsc::Receiver<Vec<u8>>>) -> Finding {
    let ends = end(children);
    let how = usize::try_from(pe).ok().and_then(|pe| ends.into_iter().nth(pe)).unwrap_or_default();
    let words = words.remove(&pe).and_then(|words| words.recv().ok()).unwrap_or_default();
    Finding::error(format!("PE {pe} ended without a result, {how}{}", quoted(&words)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_is_handed_on_and_the_librarys_own_lines_do_no_harm() {
        let (send, messages) = mpsc::channel();
        let output = format!("WARN: something\n{ID_LINE}00ff\n\nnot ours\n{FOUND_LINE}{{}}\n");
        listen(3, output.as_bytes(), &send);
        assert!(matches!(messages.recv().unwrap(), PeOutput::Id(id) if id == "00ff"));
        assert!(matches!(messages.recv().unwrap(), PeOutput::End(3, all) if all == output));
    }

    #[test]
    fn a_buffer_is_nvshmems_granularity_where_there_is_room() {
        assert_eq!(buffer_bytes(1 << 30), 512 << 20);
        assert_eq!(buffer_bytes(64 << 20), 2 << 20);
    }
}
