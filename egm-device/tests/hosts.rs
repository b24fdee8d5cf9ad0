//! Output of the program for recorded hosts: `tests/hosts/*.txt` are their `/proc` and `/sys`.
//!
//! Each `tests/golden/*.txt` is a list of commands with their output, and was reviewed. After an intended change, write
//! them anew and read the difference:
//! ```text
//! EGM_GOLDEN=write cargo test -p egm-device --test hosts && git diff egm-device/tests/golden
//! ```

#[cfg(test)]
mod record;

#[cfg(test)]
mod tests {
    use std::fmt::Write;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;
    use std::process::Command;

    use egm_device::Ledger;
    use egm_device::carve::plan::Request;
    use egm_device::ledger::{Identity, Paths, Watch};
    use egm_device::owner::Owner;
    use egm_device::region::Survey;

    /// A host is one file or several laid over each other.
    const STORIES: &[(&str, &[(&str, &str)])] = &[
        (
            "lab",
            &[
                ("lab-whole", "regions"),
                ("lab-whole", "carve advise --hypervisor 5GiB --how memmap=1GiB,dax=1GiB,mem"),
                (
                    "lab-whole",
                    "carve advise --hypervisor 5GiB --how memmap=1GiB,dax=1GiB,mem --json > split.json",
                ),
                ("lab-whole", "carve verify split.json"),
                ("lab-split", "regions"),
                ("lab-split", "carve verify split.json"),
                ("lab-split", "carve advise --undo"),
                ("lab-whole", "carve advise --hypervisor 5GiB --how memmap=9GiB,mem"),
                ("lab-whole", "carve advise --hypervisor 5GiB --how mem,memmap"),
                ("lab-whole", "carve advise --hypervisor 9GiB"),
            ],
        ),
        ("dax-dynamic", &[("dax-dynamic", "regions")]),
        (
            "x86-2-sockets",
            &[
                ("x86-2-sockets", "regions"),
                ("x86-2-sockets", "carve advise --hypervisor 64GiB"),
                ("x86-2-sockets", "carve advise --hypervisor 64GiB --how hugetlb"),
                ("x86-2-sockets", "carve advise --hypervisor 32GiB --per-node --how mem"),
                ("x86-2-sockets", "carve advise --hypervisor 32GiB --per-node --json > split.json"),
                ("x86-2-sockets-split", "regions"),
                ("x86-2-sockets-split", "carve verify split.json"),
                ("x86-2-sockets-split", "carve advise --undo"),
            ],
        ),
        (
            "grace",
            &[
                ("grace-whole", "regions"),
                ("grace-whole", "carve advise --hypervisor 32GiB --per-node"),
                ("grace-whole", "carve advise --hypervisor 32GiB --per-node --how memmap"),
                ("grace-whole", "carve advise --hypervisor 64GiB --how mem"),
                ("grace-whole", "carve advise --hypervisor 32GiB --per-node --json > split.json"),
                ("grace-egm+egm-links", "regions"),
                ("grace-egm+egm-links", "carve verify split.json"),
                ("grace-egm+egm-links", "carve advise --undo"),
                ("grace-egm+egm-list+egm-hostile", "regions"),
                ("grace-egm+egm-reversed+grace-hidden", "regions"),
            ],
        ),
    ];

    /// Makes the files of `host` below `root`: `=== path` and its content, `=== path -> target` for a link, `=== path
    /// (srat)` for an ACPI table with one structure a line, `=== path <- file` for a file of this repository. Text
    /// before the first is a description.
    fn plant(host: &str, root: &Path) {
        for name in host.split('+') {
            let text = fs::read_to_string(format!("tests/hosts/{name}.txt")).unwrap();
            for block in text.split("=== ").skip(1) {
                let (head, content) = block.split_once('\n').unwrap();
                let path = root.join(head.split_whitespace().next().unwrap());
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                if let Some((_, target)) = head.split_once(" -> ") {
                    symlink(target, path).unwrap();
                } else if let Some((_, file)) = head.split_once(" <- ") {
                    fs::copy(Path::new("..").join(file), path).unwrap();
                } else if head.ends_with(" (srat)") {
                    fs::write(path, srat(content)).unwrap();
                } else {
                    fs::write(path, content).unwrap();
                }
            }
        }
    }

    /// ACPI 6.5, 5.2.16: `processor DOMAIN` and `memory DOMAIN START SIZE`, all enabled.
    fn srat(text: &str) -> Vec<u8> {
        let number = |word: &str| {
            let hexadecimal = word.strip_prefix("0x").map(|digits| u64::from_str_radix(digits, 16).unwrap());
            hexadecimal.unwrap_or_else(|| word.parse().unwrap())
        };
        let mut table = vec![0; 48];
        for line in text.lines() {
            let (kind, numbers) = line.split_once(' ').unwrap();
            let numbers: Vec<u64> = numbers.split(' ').map(number).collect();
            let domain = u32::try_from(numbers[0]).unwrap().to_le_bytes();
            if kind == "processor" {
                table.extend([&[2, 24, 0, 0][..], &domain, &[0; 4], &1u32.to_le_bytes(), &[0; 8]].concat());
            } else {
                let (start, size) = (numbers[1].to_le_bytes(), numbers[2].to_le_bytes());
                let flags = 1u32.to_le_bytes();
                table.extend(
                    [&[1, 40][..], &domain, &[0; 2], &start, &size, &[0; 4], &flags, &[0; 8]].concat(),
                );
            }
        }
        table
    }

    /// Runs `command`, with `> file` at its end if there is, on `host`; returns the exit code and the output.
    fn run(host: &str, command: &str, folder: &Path) -> (i32, String) {
        let root = folder.join(host);
        if !root.exists() {
            plant(host, &root);
        }
        let (words, into) =
            command.split_once(" > ").map_or((command, None), |(words, into)| (words, Some(into)));
        let mut program = Command::new(env!("CARGO_BIN_EXE_egm-device"));
        program.args(words.split(' ')).current_dir(folder).arg("--root").arg(&root);
        let output = program.output().unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        let printed = match into {
            Some(into) => fs::write(folder.join(into), stdout).map(|()| String::new()).unwrap(),
            None => stdout,
        };
        let stderr = String::from_utf8(output.stderr).unwrap();
        (output.status.code().unwrap(), printed + &stderr)
    }

    #[test]
    fn every_sequence_of_commands_prints_its_golden_file() {
        let write = std::env::var_os("EGM_GOLDEN").is_some_and(|value| value == "write");
        let mut wrong = Vec::new();
        for (name, commands) in STORIES {
            let folder = tempfile::tempdir().unwrap();
            let mut transcript = String::new();
            for (host, command) in *commands {
                let (code, printed) = run(host, command, folder.path());
                let printed = printed.replace(folder.path().to_str().unwrap(), "");
                writeln!(transcript, "{host}$ egm-device {command}\n{printed}[{code}]\n").unwrap();
            }
            let golden = format!("tests/golden/{name}.txt");
            if write {
                fs::write(&golden, &transcript).unwrap();
            } else if fs::read_to_string(&golden).ok().as_deref() != Some(&transcript) {
                wrong.push(golden);
            }
        }
        assert!(wrong.is_empty(), "not as in {}: see the head of this file", wrong.join(", "));
    }

    #[test]
    fn a_slice_is_shown_with_its_owner_for_as_long_as_it_has_one() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("lab-split");
        plant("lab-split", &root);
        fs::create_dir_all(root.join("proc/sys/kernel/random")).unwrap();
        fs::write(root.join("proc/sys/kernel/random/boot_id"), "a boot\n").unwrap();
        let regions = || run("lab-split", "regions", folder.path()).1;
        assert!(!regions().contains("Slices") && !root.join("run").exists());

        let ledger = Ledger::open(Paths::below(&root), Identity::read(&root).unwrap()).unwrap();
        let local = Survey::of(&root, &[]).regions.into_iter().find(|region| region.name == "local").unwrap();
        let lease =
            ledger.grant(&local, &Request::new(4 << 20, Owner::this("vm<1>")), &Watch::unobserved()).unwrap();
        let shown = regions();
        let line = shown.lines().find(|line| line.contains("vm<1>")).unwrap();
        assert!(line.contains("local") && line.contains("4 MiB"), "{shown}");
        let page = run("lab-split", "regions --html", folder.path()).1;
        assert!(page.contains("vm&lt;1&gt; (process") && !page.contains("vm<1>"));
        drop(lease);
        assert!(!regions().contains("vm<1>"));
    }

    #[test]
    fn a_host_that_was_recorded_is_the_host_that_was_seen() {
        let folder = tempfile::tempdir().unwrap();
        let (_, regions) = run("x86-2-sockets", "regions --json", folder.path());
        let facts = crate::record::of(&serde_json::from_str(&regions).unwrap());
        fs::write(folder.path().join("facts.json"), facts.to_string()).unwrap();
        let (_, here) = run("x86-2-sockets", "carve advise --hypervisor 64GiB", folder.path());
        let mut elsewhere = Command::new(env!("CARGO_BIN_EXE_egm-device"));
        elsewhere.args(["carve", "advise", "--hypervisor", "64GiB", "--facts", "facts.json"]);
        let output = elsewhere.current_dir(folder.path()).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), here);
    }

    #[test]
    fn every_command_has_a_manual_page_and_every_shell_its_completions() {
        let folder = tempfile::tempdir().unwrap();
        let program = |words: &[&str]| {
            let output = Command::new(env!("CARGO_BIN_EXE_egm-device")).args(words).output().unwrap();
            assert!(output.status.success(), "{words:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        program(&["man", "--into", folder.path().to_str().unwrap()]);
        for page in ["egm-device", "egm-device-regions", "egm-device-carve-advise", "egm-device-carve-verify"]
        {
            let text = fs::read_to_string(folder.path().join(format!("{page}.1"))).unwrap();
            assert!(text.contains(".SH NAME"), "{page}");
        }
        assert!(program(&["man", "carve advise"]).contains("hypervisor"));
        for shell in ["bash", "zsh", "fish"] {
            assert!(program(&["completions", shell]).contains("advise"), "{shell}");
        }
    }
}
