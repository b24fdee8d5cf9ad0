//! Every configuration in `configs/` has a reviewed plan.
//!
//! The plan of each, on recorded or hand-made facts, is pinned under `tests/golden/` as JSON and as text, with NCCL's view of
//! those that have host functions. After a change
//! that is meant, write them anew and read the difference:
//! ```text
//! EGM_GOLDEN=write cargo test -p egm-vmm --test plan_golden && git diff vmm/tests/golden
//! ```

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::{Path, PathBuf};

    use egm_vmm::config::{self, Architecture};
    use egm_vmm::facts::{self, Facts};
    use egm_vmm::plan::{self, Plan, Screen, View};

    /// Relative to this package, where tests run: paths in the plans do not depend on the checkout.
    const CONFIGS: &str = "../configs";
    const GOLDEN: &str = "tests/golden";

    /// Configurations of machines, not what they share.
    fn configs() -> Vec<(String, PathBuf)> {
        let files = fs::read_dir(CONFIGS).unwrap().map(|entry| entry.unwrap().path());
        let mut all: Vec<(String, PathBuf)> = files
            .filter(|path| path.extension().is_some_and(|ext| ext == "json"))
            .map(|path| (path.file_stem().unwrap().to_str().unwrap().to_owned(), path))
            .filter(|(name, _)| name != "schema" && !name.starts_with("base-"))
            .collect();
        all.sort();
        all
    }

    fn plan_of(path: &Path) -> Plan {
        plan_and_host(path).0
    }

    /// The plan on the host that the configuration is for.
    fn plan_and_host(path: &Path) -> (Plan, Facts) {
        let spec = config::load(path).unwrap();
        let host = match spec.arch {
            Architecture::X86_64 => "x86-server.json".as_ref(),
            Architecture::Aarch64 => "grace.json".as_ref(),
        };
        let folder = Path::new(CONFIGS).join("facts");
        // A host that a configuration was made for has its name.
        let own = folder.join(path.file_name().unwrap());
        let facts = facts::load(&if own.exists() { own } else { folder.join::<&Path>(host) }).unwrap();
        let plan = plan::plan(&spec, &facts).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        (plan, facts)
    }

    #[test]
    fn every_configuration_has_the_plan_that_was_reviewed() {
        let write = std::env::var_os("EGM_GOLDEN").is_some_and(|value| value == "write");
        let mut wrong = Vec::new();
        for (name, path) in configs() {
            let (plan, facts) = plan_and_host(&path);
            let mut all = vec![("json", plan::json(&plan)), ("txt", plan::text(&plan, &View::of(&facts)))];
            if plan.passthrough.is_some() {
                all.push(("xml", plan::nccl(&plan, &facts)));
            }
            for (kind, made) in all {
                let golden = Path::new(GOLDEN).join(format!("{name}.{kind}"));
                if write {
                    fs::write(&golden, &made).unwrap();
                } else if fs::read_to_string(&golden).ok().as_deref() != Some(&made) {
                    wrong.push(golden.display().to_string());
                }
            }
        }
        assert!(wrong.is_empty(), "missing or different: {}; see the top of this file", wrong.join(", "));
    }

    #[test]
    fn on_a_terminal_texts_have_80_columns_but_for_the_memory_map() {
        let mut long = Vec::new();
        for (name, path) in configs() {
            let (plan, facts) = plan_and_host(&path);
            let text = plan::text(&plan, &View { screen: Screen::plain(80), ..View::of(&facts) });
            let (before, map) = text.split_once("\nGuest physical memory\n").unwrap();
            let (_, after) = map.split_once("\n\n").unwrap();
            let lines = before.lines().chain(after.lines());
            long.extend(lines.filter(|line| line.chars().count() > 80).map(|line| format!("{name}: {line}")));
        }
        assert!(long.is_empty(), "{}", long.join("\n"));
    }

    /// Debian's initramfs resets a guest without a root file system where the command line has `panic=`. The lab starts the
    /// two machines that have it with an initramfs of its own.
    #[test]
    fn a_machine_without_a_root_file_system_opens_a_shell() {
        for (name, path) in configs() {
            let plan: serde_json::Value = serde_json::from_str(&plan::json(&plan_of(&path))).unwrap();
            let words: Vec<&str> = plan["boot"]["cmdline"].as_str().unwrap().split(' ').collect();
            let of_the_lab = ["demo", "grace-lab-smoke"].contains(&name.as_str());
            assert_eq!(words.iter().any(|word| word.starts_with("panic=")), of_the_lab, "{name}");
            assert_eq!(words.contains(&"break"), !of_the_lab, "{name}");
        }
    }

    #[test]
    fn no_golden_plan_is_left_over() {
        let names: BTreeSet<String> = configs().into_iter().map(|(name, _)| name).collect();
        for entry in fs::read_dir(GOLDEN).unwrap() {
            let path = entry.unwrap().path();
            assert!(names.contains(path.file_stem().unwrap().to_str().unwrap()), "{}", path.display());
        }
    }

    #[test]
    fn the_json_of_a_plan_is_the_plan() {
        for (name, path) in configs() {
            let plan = plan_of(&path);
            assert_eq!(serde_json::from_str::<Plan>(&plan::json(&plan)).unwrap(), plan, "{name}");
        }
    }

    #[test]
    fn a_page_has_everything_in_itself_and_escapes_the_contents_of_files() {
        let (mut plan, facts) = plan_and_host(&Path::new(CONFIGS).join("demo.json"));
        plan.description = "<script>alert('x')</script>".to_owned();
        let page = plan::html(&plan, &View::of(&facts));
        assert!(page.contains("&lt;script&gt;") && !page.contains("<script"));
        for outside in ["http://", "https://", "src=", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
        for plain in ["EGM, node 2", "virtio-net egmtap0", "<h2>Memory map</h2>"] {
            assert!(page.contains(plain), "{plain}");
        }
    }
}
