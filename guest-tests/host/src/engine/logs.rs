//! The ends of the logs of failed scenarios: if a run's files are lost with its machine, only its output is left.

use std::fs;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::iter;
use std::path::{Path, PathBuf};

use crate::engine::error::LabError;
use crate::engine::results::printable;

/// Names of a guest's logs.
pub(crate) const CONSOLE: &str = "console.log";
pub(crate) const VMM_LOG: &str = "vmm.log";
/// Maximum lines of each log, bytes read for them, and logs of one scenario.
const LINES: usize = 12;
const BYTES: u64 = 4096;
const LOGS: usize = 8;

/// The last lines of every log below `folder`, the folder's own first; logs that are empty have none.
pub(crate) fn ends(folder: &Path) -> String {
    let mut logs = found(folder, 1);
    logs.sort_by_key(|path| (path.components().count(), path.clone()));
    let ends = logs.iter().take(LOGS).filter_map(|path| Some((path, end(path).ok()?)));
    let shown = ends.filter(|(_, lines)| !lines.is_empty());
    shown.map(|(path, lines)| format!("the end of {}:\n  {}\n", path.display(), lines.join("\n  "))).collect()
}

/// The folder for the logs of a scenario's next boot, which replace none: `report` for the first boot, and a folder in
/// it for each later one.
pub(crate) fn of_next_boot(report: &Path) -> Result<PathBuf, LabError> {
    let later = (2_u32..).map(|boot| report.join(format!("boot-{boot}")));
    let mut folders = iter::once(report.to_owned()).chain(later);
    let folder = folders.find(|folder| !folder.join(CONSOLE).exists()).unwrap_or_else(|| report.to_owned());
    fs::create_dir_all(&folder).map_err(LabError::file("make", &folder))?;
    Ok(folder)
}

/// Removes the logs of an earlier run, which would be taken for those of the next.
pub(crate) fn clear(folder: &Path) -> Result<(), LabError> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(LabError::file("remove", folder)(error)),
        _ => Ok(()),
    }
}

/// Removes an earlier run's file, so that it is not taken for this run's.
pub(crate) fn remove(path: &Path) -> Result<(), LabError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(LabError::file("remove", path)(error)),
        _ => Ok(()),
    }
}

fn found(folder: &Path, depth: usize) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut logs = Vec::new();
    for path in entries {
        if path.extension().is_some_and(|extension| extension == "log") {
            logs.push(path);
        } else if depth > 0 && path.is_dir() {
            logs.append(&mut found(&path, depth - 1));
        }
    }
    logs
}

fn end(path: &Path) -> io::Result<Vec<String>> {
    let mut file = fs::File::open(path)?;
    let size = file.metadata()?.len();
    file.seek(SeekFrom::Start(size.saturating_sub(BYTES)))?;
    let mut bytes = Vec::new();
    file.take(BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).map(printable).collect();
    Ok(lines.iter().skip(lines.len().saturating_sub(LINES)).cloned().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_of_each_log_are_shown_without_what_a_terminal_would_obey() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("next")).unwrap();
        let lines: String = (0..1000).map(|line| format!("line {line}\n")).collect();
        fs::write(folder.path().join("vmm.log"), "error: \x1b[31mit\n").unwrap();
        fs::write(folder.path().join("next/console.log"), lines).unwrap();
        fs::write(folder.path().join("next/empty.log"), "").unwrap();
        fs::write(folder.path().join("plan.json"), "{}").unwrap();
        let ends = ends(folder.path());
        let shown: Vec<_> = ends.lines().collect();
        assert!(shown[0].ends_with("/vmm.log:") && shown[1] == "  error:  [31mit", "{ends}");
        assert!(shown[2].ends_with("next/console.log:"), "{ends}");
        assert_eq!((shown[3], shown[14], shown.len()), ("  line 988", "  line 999", 15));
    }

    #[test]
    fn the_logs_of_each_boot_stay_where_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let report = folder.path().join("scenario");
        for expected in [report.clone(), report.join("boot-2"), report.join("boot-3")] {
            let boot = of_next_boot(&report).unwrap();
            assert_eq!(boot, expected);
            assert_eq!(of_next_boot(&report).unwrap(), expected, "it has not booted yet");
            fs::write(boot.join(CONSOLE), "").unwrap();
        }
        fs::write(report.join("boot-2").join(VMM_LOG), "error: it\n").unwrap();
        assert!(ends(&report).contains("boot-2/vmm.log:\n  error: it\n"));
    }

    #[test]
    fn a_folder_that_is_not_there_has_no_logs() {
        assert_eq!(ends(Path::new("/nonexistent")), "");
    }
}
