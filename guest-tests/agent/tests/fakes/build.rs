//! Compiles the doubles and the program that they are tried on, once for all tests of this file.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use egm_guest::findings::Verdict;

/// Programs and libraries of the tests.
pub(crate) struct Fakes {
    /// The folder of the doubles.
    pub(crate) folder: PathBuf,
    /// egm-guest, which loads them.
    pub(crate) program: PathBuf,
}

/// A double: its name and its sources in `tests/fake`.
const LIBRARIES: &[(&str, &[&str])] = &[
    ("libcuda.so.1", &["cuda/device.cpp", "cuda/kernels.cpp", "cuda/memory.cpp", "cuda/streams.cpp"]),
    ("libnvshmem_host.so.3", &["nvshmem.cpp"]),
    ("libgdrapi.so.2", &["gdrapi.cpp"]),
];

/// Builds all of it; nothing where there is no C++ compiler.
pub(crate) fn fakes() -> Option<Fakes> {
    if Command::new("c++").arg("--version").output().is_err() {
        eprintln!("skipped: no C++ compiler on this machine (c++), so there are no doubles to try");
        return None;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fakes");
    fs::create_dir_all(&folder).unwrap();
    // Tests are processes of their own: the first one builds, the others wait for it.
    let lock = File::create(folder.join("lock")).unwrap();
    lock.lock().unwrap();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake");
    for (name, files) in LIBRARIES {
        compile(&folder, name, &sources, files);
    }
    let program = program();
    lock.unlock().unwrap();
    Some(Fakes { folder, program })
}

/// Compiles a library, unless it is newer than everything that it may be made of.
fn compile(folder: &Path, name: &str, sources: &Path, files: &[&str]) {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vendor/kernels/egm.cu");
    let made = |path: &Path| fs::metadata(path).and_then(|file| file.modified()).ok();
    let mut parts: Vec<PathBuf> = files.iter().map(|file| sources.join(file)).collect();
    parts.extend([sources.join("fault.h"), sources.join("cuda/fake.h"), kernels.clone()]);
    let library = folder.join(name);
    if made(&library)
        .is_some_and(|made_at| parts.iter().all(|part| made(part).is_some_and(|at| at < made_at)))
    {
        return;
    }
    let unfinished = folder.join(format!("{name}.new"));
    let mut command = Command::new("c++");
    command.args([
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wextra",
        "-shared",
        "-fPIC",
        "-pthread",
        "-fvisibility=hidden",
    ]);
    command.arg(format!("-DEGM_KERNELS=\"{}\"", kernels.display()));
    command.arg(format!("-Wl,-soname,{name}")).arg("-o").arg(&unfinished);
    command.args(files.iter().map(|file| sources.join(file))).arg("-ldl");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    fs::rename(unfinished, library).unwrap();
}

/// egm-guest as `cargo guest` links it, but not optimised: that takes less time here than it saves.
fn program() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let flags = "target.'cfg(target_env = \"gnu\")'.rustflags = ['-C', 'target-feature=-crt-static']";
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(&root).args([
        "build",
        "-p",
        "egm-guest",
        "--target-dir",
        "target/guest",
        "--config",
        flags,
    ]);
    command.arg("--message-format=json-render-diagnostics");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let built = text.lines().rev().find_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let is_ours = message.get("target")?.get("name")?.as_str()? == "egm-guest";
        message.get("executable")?.as_str().filter(|_| is_ours).map(PathBuf::from)
    });
    built.expect("cargo names the program that it built")
}

/// The verdicts in what a run printed: a document of the run, or one a line.
pub(crate) fn verdicts(text: &str) -> Vec<Verdict> {
    let of = |value: &serde_json::Value| serde_json::from_value(value.clone()).ok();
    match serde_json::from_str::<serde_json::Value>(text) {
        Ok(run) if run.get("verdicts").is_some() => {
            run["verdicts"].as_array().unwrap().iter().filter_map(of).collect()
        }
        _ => text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect(),
    }
}
