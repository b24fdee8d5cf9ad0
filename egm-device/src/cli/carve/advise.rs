//! `egm-device carve advise`: what to write where, so that guests get the memory that the hypervisor does not need.

use std::fmt::Write;
use std::process::ExitCode;

use Side::{Left, Right};
use egm_address::{ByteSize, Printable, SizeError};
use egm_report::program::{Outcome, print_json};
use egm_report::show::{Screen, Side, Style, Table, print, size};
use egm_report::{Blame, Remedy, Report};
use serde_json::{Map, Value, json};

use crate::carve::advise::{
    AdviseError, Need, Setting, Split, SplitMethod, SplitPart, SplitRequest, Undo, advise, undo,
};
use crate::host::Host;
use crate::region::{HostFacts, HostFile, ReservedSpan, meminfo};

/// Print the kernel parameters and files that split this host's memory between its kernel and guests
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub(super) struct Args {
    /// Memory that the host's kernel keeps, such as 64GiB; ordinary memory of all guests comes from it
    #[arg(long, value_name = "SIZE", required_unless_present = "undo")]
    hypervisor: Option<ByteSize>,
    /// Apply that size to each node, instead of all nodes together
    #[arg(long)]
    per_node: bool,
    /// Method: mem, memmap, hugetlb, dax or firmware [default: by the host]. Several methods share each node's memory from
    /// the lowest address up, and the last one gets the rest: memmap=1GiB,dax=1GiB,mem
    #[arg(long, value_name = "METHOD[=SIZE]", value_delimiter = ',', value_parser = part)]
    how: Vec<SplitPart>,
    /// Print how to undo the split
    #[arg(long, conflicts_with_all = ["hypervisor", "per_node", "how"])]
    undo: bool,
    #[command(flatten)]
    host: Host,
    /// Print JSON, which "carve verify" reads
    #[arg(long)]
    json: bool,
}

const EXAMPLE: &str = "\
Print the advice, save it, apply it, reboot, and verify the result:

  egm-device carve advise --hypervisor 64GiB
  egm-device carve advise --hypervisor 64GiB --json > split.json
  egm-device carve verify split.json

This command changes nothing. For another host, record it there with \"egm-vmm facts > facts.json\", and name the \
file with --facts.";

/// `memmap=1GiB`, or `mem` alone.
fn part(text: &str) -> Result<SplitPart, String> {
    let (name, size) = text.split_once('=').map_or((text, None), |(name, size)| (name, Some(size)));
    let all = [
        SplitMethod::Mem,
        SplitMethod::Memmap,
        SplitMethod::Hugetlb,
        SplitMethod::Dax,
        SplitMethod::Firmware,
    ];
    let how = all.into_iter().find(|how| how.name() == name);
    let how = how.ok_or("write mem, memmap, hugetlb, dax or firmware")?;
    let size = size.map(str::parse).transpose().map_err(|error: SizeError| error.to_string())?;
    Ok(SplitPart { how, size })
}

pub(super) fn run(args: &Args) -> Outcome {
    let recorded = args.host.survey()?;
    let screen = Screen::of_stdout();
    let Some(hypervisor) = args.hypervisor else {
        let undo = undo(&recorded.host, &recorded.regions);
        if args.json {
            print_json(&undo)
        } else {
            print(undo_text(&undo, screen))
        }
        return Ok(ExitCode::SUCCESS);
    };
    let request = SplitRequest { hypervisor, per_node: args.per_node, parts: args.how.clone() };
    let split = advise(&recorded.host, &recorded.regions, &request);
    let split = match args.host.local() {
        Some(_) => split?,
        None => split.map_err(RecordedHostError)?,
    };
    let need = args.host.local().map_or_else(Need::default, |host| Need::of(&meminfo(host.root())));
    let warning = need.warning(&split);
    if args.json {
        warning.iter().for_each(|warning| tracing::warn!("{warning}"));
        print_json(&split)
    } else {
        print(text(&split, &recorded.host, &again(args), screen) + &warned(warning.as_deref(), screen))
    }
    Ok(ExitCode::SUCCESS)
}

/// A split that a recorded host cannot have: a command on this host does not change its record.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct RecordedHostError(AdviseError);

impl Report for RecordedHostError {
    fn remedy(&self) -> Remedy {
        match self.0 {
            AdviseError::IomemHidden => Blame::Host.help("record that host as root"),
            AdviseError::NoAffinity { .. } => Blame::Host
                .help("record that host as root; without the table, use --how mem or --how hugetlb"),
            _ => self.0.remedy(),
        }
    }
}

/// The warning at the end of the advice, where it is not overlooked.
fn warned(warning: Option<&str>, screen: Screen) -> String {
    let line = |warning| format!("\n{}\n", screen.paint(Style::Yellow, &format!("warning: {warning}")));
    warning.map(line).unwrap_or_default()
}

/// The command line that gives the same advice.
fn again(args: &Args) -> String {
    let mut words = vec!["egm-device carve advise".to_owned()];
    words.extend(args.hypervisor.map(|size| format!("--hypervisor {size}")));
    words.extend(args.per_node.then(|| "--per-node".to_owned()));
    let way = |part: &SplitPart| match part.size {
        Some(size) => format!("{}={size}", part.how.name()),
        None => part.how.name().to_owned(),
    };
    let ways: Vec<_> = args.how.iter().map(way).collect();
    words.extend((!ways.is_empty()).then(|| format!("--how {}", ways.join(","))));
    words.join(" ")
}

/// Steps with numbers, each with what to write.
struct Steps {
    out: String,
    number: u32,
    screen: Screen,
}

impl Steps {
    fn step(&mut self, title: &str, lines: &[String]) {
        self.number = self.number.saturating_add(1);
        let _ = writeln!(
            self.out,
            "\n{}",
            self.screen.paint(Style::Strong, &format!("{}. {title}", self.number))
        );
        for line in lines.iter().flat_map(|lines| lines.lines()) {
            let _ = writeln!(self.out, "     {}", Printable(line));
        }
    }
}

fn text(split: &Split, now: &HostFacts, again: &str, screen: Screen) -> String {
    let mut out = String::new();
    for how in &split.ways {
        out += &screen.paint(Style::Strong, summary(*how));
        out.push('\n');
    }
    if split.ways.contains(&SplitMethod::Mem) && now.arch == "aarch64" {
        out +=
            &screen.paint(Style::Yellow, "On Arm /dev/mem maps hidden memory without caches: for tests only");
        out.push('\n');
    }
    out.push('\n');
    node_table(split, now).write(&mut out, screen);
    let mut steps = Steps { out, number: 0, screen };
    if !split.settings.is_empty() {
        steps.step(
            "Set in the firmware (setup form, or Redfish PATCH to Bios/Settings)",
            &settings(&split.settings),
        );
    }
    command_line(&mut steps, &split.remove, &split.words);
    if !split.regions.is_empty() {
        steps.step("Write /etc/egm-device/host/hidden.json", &[host_file(&split.regions)]);
    }
    steps.step("Save this advice", &[format!("{again} --json > split.json")]);
    steps.step("Reboot", &[]);
    if !split.commands.is_empty() {
        steps.step("Run after this and every boot: what it writes is lost with power", &split.commands);
    }
    steps.step("Verify the split", &["egm-device carve verify split.json".to_owned()]);
    steps.out
}

const fn summary(how: SplitMethod) -> &'static str {
    match how {
        SplitMethod::Mem => "mem=: the kernel sees nothing above an address; guests get it through /dev/mem",
        SplitMethod::Memmap => "memmap=: spans are reserved; guests get them through /dev/mem",
        SplitMethod::Hugetlb => "hugetlb: the kernel sees the pages and gives them to guests only",
        SplitMethod::Dax => "device-DAX: struct pages stay, the kernel's allocator leaves the memory alone",
        SplitMethod::Firmware => "EGM: the firmware hides the memory, the GPU reaches it at link speed",
    }
}

fn node_table(split: &Split, now: &HostFacts) -> Table<'static> {
    let sides = &[Right, Right, Right, Right, Left];
    let mut table = Table::new(sides, &["node", "MemTotal now", "hypervisor keeps", "guests get", "at"]);
    for node in &split.nodes {
        let total = now.nodes.iter().find(|n| n.id == node.node).map_or(0, |n| n.total.get());
        let hidden = node.hidden.iter().map(|piece| piece.span.to_string()).collect::<Vec<_>>().join(" ");
        table.row(
            None,
            vec![
                node.node.to_string(),
                size(total),
                size(node.keeps.get()),
                size(node.guests.get()),
                if hidden.is_empty() { "-".to_owned() } else { hidden },
            ],
        );
    }
    table
}

fn settings(settings: &[Setting]) -> Vec<String> {
    let mut form = Table::new(&[Left, Right], &["form", "value"]);
    for setting in settings {
        let value = match &setting.value {
            Value::Bool(true) => "on".to_owned(),
            Value::Bool(false) => "off".to_owned(),
            value => value.to_string(),
        };
        form.row(None, vec![setting.form.clone(), value]);
    }
    let mut table = String::new();
    form.write(&mut table, Screen::FILE);
    let attributes: Map<String, Value> =
        settings.iter().map(|s| (s.attribute.clone(), s.value.clone())).collect();
    vec![table, json!({ "Attributes": attributes }).to_string()]
}

fn command_line(steps: &mut Steps, remove: &[String], words: &[String]) {
    if !remove.is_empty() {
        steps.step("Take these words from the kernel's command line", remove);
    }
    if words.is_empty() {
        return;
    }
    steps.step("Add these words to the kernel's command line", words);
    if words.iter().any(|word| word.contains('$')) {
        // /etc/default/grub is read by a shell and what it writes by GRUB, and both take a $ for their own.
        let quoted = words.join(" ").replace('$', "\\\\\\$");
        let _ = writeln!(steps.out, "   in /etc/default/grub, where $ needs this quoting, then update-grub:");
        let _ = writeln!(steps.out, "     GRUB_CMDLINE_LINUX=\"{}\"", Printable(&quoted));
    }
}

fn host_file(regions: &[ReservedSpan]) -> String {
    // Strings and numbers only, so the value always has a JSON form.
    let file = HostFile { regions: regions.to_vec(), ..HostFile::default() };
    serde_json::to_string_pretty(&file).unwrap_or_default()
}

fn undo_text(undo: &Undo, screen: Screen) -> String {
    if undo.is_empty() {
        return "This host is not split: nothing to take back.\n".to_owned();
    }
    let out = screen.paint(Style::Strong, "Taking the host back: its kernel gets all memory again") + "\n";
    let mut steps = Steps { out, number: 0, screen };
    steps.step("Stop every guest; \"egm-device ledger show\" must show no slice", &[]);
    if !undo.commands.is_empty() {
        steps.step("Run", &undo.commands);
    }
    if !undo.settings.is_empty() {
        steps.step(
            "Set in the firmware (setup form, or Redfish PATCH to Bios/Settings)",
            &settings(&undo.settings),
        );
    }
    command_line(&mut steps, &undo.remove, &[]);
    if !undo.regions.is_empty() {
        steps.step("Take these regions from the files in /etc/egm-device/host", &undo.regions);
    }
    if undo.needs_reboot() {
        steps.step("Reboot", &[]);
    }
    steps.out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_without_addresses_or_nodes_is_made_again_as_root() {
        for error in [AdviseError::IomemHidden, AdviseError::NoAffinity { nodes: 2 }] {
            let text = error.to_string();
            let error = RecordedHostError(error);
            assert_eq!((error.to_string(), error.blame()), (text, Blame::Host));
            assert!(error.help().unwrap().starts_with("record that host as root"), "{error}");
        }
        let error = RecordedHostError(AdviseError::Parts(String::new()));
        assert_eq!(error.help(), AdviseError::Parts(String::new()).help());
    }
}
