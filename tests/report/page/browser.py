"""A real headless Chromium: opens reports from the disk, runs scripts in them, and tells what they said and fetched."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from tests.needs import require

require("selenium")

from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys as Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from gspo.report.page.write import document
from gspo.report.run_files import read_run

_PATIENCE_SECONDS = 30.0  # on a machine of many other jobs
_SIZE = (1300, 1000)
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # which a container's root has not
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-quic",
    "--disable-extensions",
    "--no-first-run",
    "--window-size=1300,1000",
)


class Tab:
    """The browser's only tab."""

    def __init__(self, driver: webdriver.Chrome, directory: Path) -> None:
        self.driver = driver
        self._directory = directory  # that the pages are written to
        self._num_pages = 0
        self._shown: tuple[Path, ...] = ()

    def show(self, *runs: Path) -> None:
        """Open these runs' report, unless it is what is there: for tests that leave it as it is, or put it back."""
        if self._shown != runs:
            self.open(*runs)
            self._shown = runs

    def open(self, *runs: Path) -> Path:
        """Write these runs' report under a name of its own, open it, and wait until all of it is there."""
        self._num_pages += 1
        page = self._directory / f"report_{self._num_pages}.html"
        self.write(page, *runs)
        self.open_file(page)
        return page

    def open_file(self, page: Path) -> None:
        """Open a page that is there, and wait until all of it is."""
        self._shown = ()
        self.driver.get("about:blank")  # the page before has no more to say
        self.messages()
        self.requests()
        self.driver.get(page.as_uri())
        self.wait_until_ready()

    def write(self, page: Path, *runs: Path) -> None:
        """Write these runs' report, as a run that is watched has it written again."""
        page.write_text(document([read_run(run) for run in runs]), encoding="utf-8")

    def wait_until_ready(self) -> None:
        self.wait("return document.documentElement.dataset.ready || document.querySelector('p.broken')")

    def run(self, script: str, *arguments: object) -> Any:
        """What a script returns; `arguments` are those of a function."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, *arguments: object) -> Any:
        """The first value of a script's that is not false."""
        try:
            waiting = WebDriverWait(self.driver, _PATIENCE_SECONDS, poll_frequency=0.02)
            return waiting.until(lambda _: self.run(script, *arguments))
        except TimeoutException:
            raise AssertionError(f"never true: {script} {arguments} {self.messages()}") from None

    def settle(self) -> None:
        """Wait until everything that is under way in the page is done and drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestIdleCallback(() => done(), {timeout: 2000}))"
        )

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def find_all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def set(self, selector: str, value: object) -> None:
        """Choose or type a value, and tell the page as a user's choice does."""
        self.run(
            "const field = document.querySelector(arguments[0]); field.value = arguments[1];"
            "for (const name of ['input', 'change']) field.dispatchEvent(new Event(name, {bubbles: true}))",
            selector,
            str(value),
        )

    def click(self, selector: str) -> None:
        """Scroll to it and click it with the mouse."""
        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def press(self, *keys: str) -> None:
        """Keys of the keyboard, one after another, into whatever has the focus."""
        self.actions().send_keys(*keys).perform()

    def actions(self) -> ActionChains:
        """Of a mouse that moves at once."""
        return ActionChains(self.driver, duration=5)

    def messages(self) -> list[str]:
        """The console's warnings and errors since the last call."""
        found = cast(list[dict[str, Any]], self.driver.get_log("browser"))
        return [line["message"] for line in found if line["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Every address that pages from the disk have asked for since the last call, but for those on the disk."""
        events = [json.loads(line["message"])["message"] for line in self.driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        sockets = [event["params"]["url"] for event in events if event["method"] == "Network.webSocketCreated"]
        asked = [one["request"]["url"] for one in sent if one["documentURL"].startswith("file:")]
        return [*(url for url in asked if not url.startswith(("file:///", "data:", "blob:"))), *sockets]

    @contextmanager
    def emulated(self, command: str, undo: dict[str, Any], **settings: Any) -> Iterator[None]:
        """With a setting of the devtools in force."""
        self.driver.execute_cdp_cmd(command, settings)
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd(command, undo)

    def media(self, medium: str = "", **features: str) -> Any:
        """With a medium such as `print`, or features such as `prefers_color_scheme="dark"`."""
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        return self.emulated("Emulation.setEmulatedMedia", {"media": "", "features": []}, media=medium, features=listed)


def start(directory: Path) -> webdriver.Chrome:
    """Chromium with a new profile; skips where there is none."""
    require("chromium")
    options = webdriver.ChromeOptions()
    for argument in (*_ARGUMENTS, f"--user-data-dir={directory / 'profile'}"):
        options.add_argument(argument)
    options.binary_location = str(shutil.which("chromium"))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = Service(shutil.which("chromedriver"), env={**os.environ, "HOME": str(directory)})
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_window_size(*_SIZE)
    return driver
