//! `egm-vmm list`: the APIs of this user's machines.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use egm_report::program::{Outcome, print_json};
use egm_report::show::{Screen, Side, Style, Table, print};
use serde_json::{Value, json};

use crate::api::{Client, ClientError};

/// Time for each machine to answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Longest answer that is read, in bytes, and most characters of a field that are shown: the machine may be another user's.
const LONGEST: u64 = 64 << 10;
const WIDEST: usize = 128;
/// Most sockets that are asked; a folder in the folder, which may be another user's, has some of them.
const MOST: usize = 4096;
const MOST_INSIDE: usize = 16;

/// List the sockets of a folder, with the machine behind each
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub(super) struct Args {
    /// Folder with sockets, or with a folder for each [default: $XDG_RUNTIME_DIR/egm-vmm, or /run/egm-vmm]
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLE: &str = "\
Example: a machine that this user finds again

  folder=${XDG_RUNTIME_DIR:-/run}/egm-vmm
  mkdir -p $folder
  egm-vmm run vm.json --api $folder/vm.sock &
  egm-vmm list

\"dead\" is a socket of a process that has ended; the next machine at its path replaces it.";

/// A socket, and the machine behind it.
struct Found {
    path: PathBuf,
    /// The answer of the machine, or why there is none.
    machine: Result<Value, &'static str>,
}

pub(super) fn run(args: &Args) -> Outcome {
    let folder = args.dir.clone().unwrap_or_else(default_folder);
    let found: Vec<Found> = sockets(&folder).into_iter().map(Found::ask).collect();
    if args.json {
        print_json(&found.iter().map(Found::json).collect::<Vec<_>>());
    } else if found.is_empty() {
        print(format!("no sockets in {}\n", folder.display()));
    } else {
        print(text(&found, Screen::of_stdout()));
    }
    Ok(ExitCode::SUCCESS)
}

fn default_folder() -> PathBuf {
    let of_user = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    of_user.unwrap_or_else(|| "/run".into()).join("egm-vmm")
}

/// The sockets in `folder` and in its folders, by path. What cannot be read has none.
fn sockets(folder: &Path) -> Vec<PathBuf> {
    let mut sockets = Vec::new();
    for path in entries(folder) {
        match fs::symlink_metadata(&path).map(|file| file.file_type()) {
            Ok(kind) if kind.is_socket() => sockets.push(path),
            Ok(kind) if kind.is_dir() => {
                sockets.extend(entries(&path).into_iter().filter(|path| is_socket(path)).take(MOST_INSIDE))
            }
            _ => {}
        }
    }
    sockets.truncate(MOST);
    sockets
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().take(MOST);
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket())
}

impl Found {
    fn ask(path: PathBuf) -> Self {
        let answer = Client::new(&path).within(TIMEOUT).limited(LONGEST).ask("GET", "/egm/v1/machine");
        let machine = match answer {
            Ok(body) => serde_json::from_str(&body).map_err(|_| "no machine"),
            Err(ClientError::Unreachable { source, .. }) => Err(match source.kind() {
                io::ErrorKind::ConnectionRefused => "dead",
                io::ErrorKind::PermissionDenied => "another user's",
                _ => "no answer",
            }),
            Err(ClientError::Unreadable { .. }) => Err("no answer"),
            Err(ClientError::Refused { .. }) => Err("refused"),
        };
        Self { path, machine }
    }

    /// A field of the machine's answer, or `other`.
    fn field(&self, name: &str, other: &str) -> String {
        match &self.machine {
            Ok(machine) => match &machine[name] {
                Value::String(text) => text.chars().take(WIDEST).collect(),
                Value::Null => other.to_owned(),
                value => value.to_string().chars().take(WIDEST).collect(),
            },
            Err(_) => other.to_owned(),
        }
    }

    fn state(&self) -> String {
        self.field("state", self.machine.as_ref().err().unwrap_or(&"unknown"))
    }

    fn json(&self) -> Value {
        let machine = self.machine.as_ref().ok();
        json!({ "socket": self.path.to_string_lossy(), "state": self.state(), "machine": machine })
    }
}

fn text(found: &[Found], screen: Screen) -> String {
    let sides = [Side::Left, Side::Left, Side::Right, Side::Left];
    let mut table = Table::new(&sides, &["machine", "state", "process", "socket"]);
    for one in found {
        let style = one.machine.is_err().then_some(Style::Faint);
        let cells =
            vec![one.field("name", "-"), one.state(), one.field("pid", "-"), one.path.display().to_string()];
        table.row(style, cells);
    }
    let mut out = String::new();
    table.write(&mut out, screen);
    out
}
