//! Programs of others that are a second opinion, where they are installed: their output is in the finding, and their
//! failures are reported. The programs here are scripts; GDRCopy's print the samples of `gdr/fixtures`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use egm_guest::findings::{Outcome, Verdict};

use super::build::{self, Fakes};
use super::rdma;

/// A folder of programs, each a script.
fn scripts(all: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in all {
        let path = folder.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    folder
}

/// Verdicts of `select`, with the programs of `folder` first in the path.
fn verdicts(fakes: &Fakes, folder: &Path, select: &str, libraries: &Path) -> Vec<Verdict> {
    let mut command = Command::new(&fakes.program);
    command.args(["validate", "--json", "--seed", "7", "--size", "64KiB", "--select", select]);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::iter::once(folder.to_owned()).chain(std::env::split_paths(&path));
    command.env("PATH", std::env::join_paths(folders).unwrap()).env("LD_LIBRARY_PATH", libraries);
    build::verdicts(&String::from_utf8(command.output().unwrap().stdout).unwrap())
}

/// A script that prints a sample.
fn prints(sample: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vendor/fixtures").join(sample);
    format!("cat {}", path.display())
}

#[test]
fn what_gdrcopys_programs_print_is_in_the_findings() {
    let Some(fakes) = build::fakes() else { return };
    let [sanity, copybw, copylat] = ["sanity.txt", "copybw.txt", "copylat.txt"].map(prints);
    let folder =
        scripts(&[("gdrcopy_sanity", &sanity), ("gdrcopy_copybw", &copybw), ("gdrcopy_copylat", &copylat)]);
    let found = verdicts(&fakes, folder.path(), "gdr.sanity,gdr.copybw,gdr.copylat", folder.path());
    let [sanity, copybw, copylat] = found.as_slice() else { panic!("{found:?}") };
    for verdict in &found {
        assert_eq!(verdict.outcome, Outcome::Passed, "{verdict:#?}");
    }
    assert!(sanity.reason.starts_with("31 passed, 5 waived: basic_v2_forcepci"), "{sanity:#?}");
    let figures = |verdict: &Verdict| -> Vec<(String, Option<u64>)> {
        verdict.figures.iter().map(|figure| (figure.series.clone(), figure.bytes)).collect()
    };
    let of = |text: &str, bytes| (text.to_owned(), Some(bytes));
    let both = [of("write by gdrcopy_copybw", 131_072), of("read by gdrcopy_copybw", 131_072)];
    assert_eq!(figures(copybw), both);
    assert_eq!(figures(copylat).len(), 6, "{copylat:#?}");
}

#[test]
fn failures_of_gdrcopys_programs_are_reported() {
    let Some(fakes) = build::fakes() else { return };
    let folder = scripts(&[
        (
            "gdrcopy_sanity",
            "printf 'Total: 2, Passed: 1, Failed: 1, Waived: 0\\n\\nList of failed tests:\\n    basic\\n'; exit 1",
        ),
        ("gdrcopy_copybw", "echo 'no gdrdrv' >&2; exit 2"),
        ("gdrcopy_copylat", "echo broken; kill -9 $$"),
    ]);
    let found = verdicts(&fakes, folder.path(), "gdr.sanity,gdr.copybw,gdr.copylat", folder.path());
    let said: Vec<(Outcome, bool)> = found
        .iter()
        .zip(["1 failed: basic", "no gdrdrv", "code None"])
        .map(|(verdict, words)| (verdict.outcome, verdict.reason.contains(words)))
        .collect();
    let should = [(Outcome::Failed, true), (Outcome::Skipped, true), (Outcome::Error, true)];
    assert_eq!(said, should, "{found:#?}");
}

/// `ib_write_bw` as far as it is called: a server that stays until it is ended, and a client that writes a report.
const PERFTEST: &str = r#"[ "$1" = --version ] && exit 0
for word; do
	case $last in --out_json_file) file=$word ;; -s) size=$word ;; esac
	last=$word
done
[ "$file" ] || FILE_OF_SERVER
average=16.0
CLIENT
printf '{\n"results": {\n"MsgSize": %s,\n"BW_average": %s,\n}\n}\n' "$size" "$average" >"$file""#;

#[test]
fn ib_write_bw_is_a_second_opinion_and_a_report_that_cannot_be_fails() {
    let Some(fakes) = build::fakes() else { return };
    let libraries = rdma::made(&fakes);
    for (server, client, outcome, says) in [
        ("exec sleep 60", "", Outcome::Passed, "4096 bytes: 2.0000 GB/s, ours "),
        ("exec sleep 60", "average=0", Outcome::Failed, "measures nothing"),
        ("exec sleep 60", "size=1", Outcome::Failed, "the size that it reports"),
        ("exec sleep 60", "exit 0", Outcome::Failed, "no result in its report"),
        ("exit 1", "echo 'Unable to open file' >&2; exit 1", Outcome::Failed, "Unable to open file"),
    ] {
        let text = PERFTEST.replace("FILE_OF_SERVER", server).replace("CLIENT", client);
        let folder = scripts(&[("ib_write_bw", &text)]);
        let found = verdicts(&fakes, folder.path(), "rdma.perftest", &libraries);
        let [verdict] = found.as_slice() else { panic!("{client}: {found:?}") };
        assert_eq!(verdict.outcome, outcome, "{client}: {verdict:#?}");
        assert!(verdict.reason.contains(says), "{client}: {verdict:#?}");
        if outcome == Outcome::Passed {
            let theirs: Vec<f64> = verdict
                .figures
                .iter()
                .filter(|figure| figure.series == "ib_write_bw")
                .map(|figure| figure.value)
                .collect();
            assert_eq!(theirs, [2.0, 2.0, 2.0], "16 Gb/s are 2 GB/s, of three sizes: {verdict:#?}");
        }
    }
    fs::remove_dir_all(libraries).unwrap();
}
